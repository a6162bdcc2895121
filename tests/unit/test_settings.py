"""A configuration either starts as written or is refused with a line and what to write instead."""

from __future__ import annotations

import os
import pickle
import textwrap
from pathlib import Path

import pytest

from mindgrid.cluster.embedders.protocol import EmbedderOptions
from mindgrid.cluster.settings import Settings, load
from mindgrid.cluster.settings.quantities import byte_count, bytes_text, duration_text, seconds
from mindgrid.cluster.spec import Bounds, NamespaceKey
from mindgrid.shards.config import Driver, History, ShardConfig
from mindgrid.shards.errors import ConfigError
from mindgrid.shards.types import Space

SAMPLE = Path(__file__).parents[2] / "deploy" / "mindgrid.yaml"

# The examples of the specifications, as they are printed there.
SEED = """
namespaces:
  - block: semantic
    name: notes
    backend: pg-main
    text_search: english           # optional; FTS language for hybrid's sparse lane (default simple)
    embedder:
      provider: openai
      model: text-embedding-3-small
      dimensions: 1536
      cache_size: 4096              # optional; embed-once cache, default 4096
      options:
        api_key_env: OPENAI_API_KEY
        timeout: 30s
"""  # noqa: E501

SEED_LOG = """
namespaces:
  - { block: episodic, name: events, backend: pg-main }
"""

SMALL = """
auth: {mode: "off"}
namespaces:
  - block: semantic
    name: notes
    embedder: {provider: fake, dimensions: 8}
"""


@pytest.fixture(autouse=True)
def _no_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MINDD_")]:
        monkeypatch.delenv(name)


class Files:
    """Writes configurations and loads them."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "mindgrid.yaml"

    def load(self, text: str | bytes) -> Settings:
        data = text if isinstance(text, bytes) else textwrap.dedent(text).encode()
        self._path.write_bytes(data)
        return load(self._path)

    def refusal(self, text: str | bytes) -> tuple[int, str]:
        """Return the line and the words of the refusal."""
        with pytest.raises(ConfigError) as caught:
            self.load(text)
        path, _, line = caught.value.where.rpartition(":")
        assert path == str(self._path)
        return int(line), caught.value.problem


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def semantic(lines: str) -> str:
    """Return a small configuration whose namespace has more lines, from line 6 on."""
    return SMALL + textwrap.indent(textwrap.dedent(lines), "    ")


def test_the_sample_starts_as_it_is() -> None:
    spec = load(SAMPLE).grid_spec()
    assert [str(namespace.key) for namespace in spec.namespaces] == [
        "semantic/notes",
        "semantic/scratch",
    ]
    assert spec.namespaces[0].config.space == Space("local", "all-MiniLM-L6-v2", "", 384)


def test_the_specifications_example_loads_unchanged_with_a_lance_backend(files: Files) -> None:
    settings = files.load(
        'auth: {mode: "off"}\nbackends: [{name: pg-main, driver: lance}]\n' + SEED
    )
    (spec,) = settings.grid_spec().namespaces
    assert spec.driver is Driver.LANCE
    assert spec.cache_size == 4096
    assert spec.config.text_search == "english"
    embedder = settings.embeddings()[NamespaceKey("semantic", "notes")].spec
    assert embedder.space == Space("openai", "text-embedding-3-small", "", 1536)
    assert embedder.options.timeout_s == 30.0
    assert embedder.options.api_key_env == "OPENAI_API_KEY"


def test_the_specifications_log_loads_unchanged_with_a_lance_backend(files: Files) -> None:
    settings = files.load(
        'auth: {mode: "off"}\nbackends: [{name: pg-main, driver: lance}]\n' + SEED_LOG
    )
    (log,) = settings.grid_spec().logs
    assert (log.key, log.driver) == (NamespaceKey("episodic", "events"), Driver.LANCE)


def test_a_providers_own_options_load_as_they_are_written(files: Files) -> None:
    options = "{base_url: 'http://localhost:8080', send_dimensions: yes, batch_texts: 32}"
    embedder = f"{{provider: openai, model: m, dimensions: 8, options: {options}}}"
    settings = files.load(SMALL.replace("{provider: fake, dimensions: 8}", embedder))
    (embedding,) = settings.embeddings().values()
    assert embedding.spec.flag("send_dimensions", False) is True
    assert embedding.spec.count("batch_texts", 2048) == 32


def test_everything_but_auth_and_namespaces_has_a_default(files: Files) -> None:
    settings = files.load(SMALL)
    assert (settings.server.host, settings.server.http.port) == ("127.0.0.1", 8080)
    assert settings.server.http.body_bytes_max == 32 * 2**20
    assert settings.server.grpc.port == 7777
    spec = settings.grid_spec()
    assert spec.bounds == Bounds()
    assert spec.storage.is_absolute()
    (namespace,) = spec.namespaces
    assert namespace.config == ShardConfig(Space("fake", "fake", "", 8))
    assert (namespace.shards, namespace.driver) == (1, Driver.LANCE)
    (embedding,) = settings.embeddings().values()
    assert embedding.spec.options == EmbedderOptions()


def test_the_cluster_is_told_how_a_model_is_reached(files: Files) -> None:
    options = "options: {timeout: 5s, replicas: 3, path: models}"
    settings = files.load(SMALL.replace("dimensions: 8", f"dimensions: 8, {options}"))
    (spec,) = settings.grid_spec().namespaces
    assert (spec.embedder.timeout_s, spec.embedder.replicas) == (5.0, 3)
    assert spec.embedder.path == str(Path("models").absolute())
    assert spec.embedder == settings.embeddings()[spec.key].spec.options


def test_settings_and_specs_survive_pickling(files: Files) -> None:
    settings = files.load(SMALL)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert pickle.loads(pickle.dumps(settings.grid_spec())) == settings.grid_spec()


def test_bounds_reach_the_shards_and_the_cluster(files: Files) -> None:
    spec = files.load(
        SMALL + "engine: {seal_rows: 16, seal_after: 250ms, exact_rows_max: 32}\n"
        "cluster: {hosts: 2, deadline: 1m30s, batch_bytes: 1MiB}\n"
    ).grid_spec()
    config = spec.namespaces[0].config
    assert (config.seal_rows, config.seal_after_s, config.exact_rows_max) == (16, 0.25, 32)
    assert spec.hosts == 2
    assert (spec.bounds.deadline_s, spec.bounds.batch_bytes) == (90.0, 2**20)


def test_variables_override_the_file(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDD_SERVER__HTTP__PORT", "8081")
    monkeypatch.setenv("MINDD_SERVER__HTTP__BODY_BYTES_MAX", "1MiB")
    monkeypatch.setenv("MINDD_STORAGE__PATH", "/elsewhere")
    monkeypatch.setenv("MINDD_ENGINE__SEAL_AFTER", "5s")
    monkeypatch.setenv("MINDD_BENCH", "true")
    monkeypatch.setenv("MINDD_AUTH__MODE", "off")
    monkeypatch.setenv("MINDD_TOKEN", "of another program, and none of our business")
    settings = files.load(SMALL.replace('auth: {mode: "off"}', "server: {http: {port: 8090}}"))
    assert settings.server.http.port == 8081
    assert settings.server.http.body_bytes_max == 2**20
    assert settings.server.grpc.port == 7777
    assert settings.storage.path == "/elsewhere"
    assert settings.engine.seal_after == 5.0
    assert settings.bench is True


def test_a_list_is_overridden_whole_as_json(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "MINDD_NAMESPACES",
        '[{"block": "semantic", "name": "b", "embedder": {"provider": "fake", "dimensions": 2}}]',
    )
    assert [namespace.name for namespace in files.load(SMALL).namespaces] == ["b"]
    monkeypatch.setenv("MINDD_NAMESPACES", "[{")
    with pytest.raises(ConfigError, match=r"namespaces.*write it as JSON"):
        files.load(SMALL)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MINDD_SERVER__HTTP__PORT", "high", "server.http.port must be a whole number"),
        ("MINDD_SERVER__HTTP__PRT", "1", "server.http.prt is not a setting; did you mean port"),
        ("MINDD_SERVR__HTTP__PORT", "1", "servr.http.port is not a setting; did you mean server"),
        ("MINDD_SERVER__HOST", "0.0.0.0", "server.host must be 127.0.0.1"),
    ],
)
def test_a_bad_variable_is_named(
    files: Files, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        files.load(SMALL)
    assert caught.value.where == name
    assert words in caught.value.problem


def test_an_unknown_key_is_refused_with_its_line_and_a_guess(files: Files) -> None:
    line, problem = files.refusal(SMALL + "server:\n  http:\n    prot: 80\n")
    assert line == 9
    assert problem.startswith("server.http.prot is not a setting; did you mean port?")


def test_all_problems_are_reported_at_once_in_the_files_order(files: Files) -> None:
    line, problem = files.refusal(semantic("shards: 0\nrecall: 2\nhistory: soon"))
    assert line == 7
    assert len(problem.split("\n")) == 3
    for name in ("shards must be at least 1", "recall must be at most 1", "history must be none"):
        assert name in problem


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("server: {http: {port: 0}}", "server.http.port must be at least 1"),
        ("server: {http: {port: 65536}}", "server.http.port must be at most 65535"),
        ("server: {http: {port: true}}", "must be a number, not true or false"),
        ("server: {http: {port: [1]}}", "server.http.port must be a whole number"),
        ("server: {http: {port: 1.5}}", "server.http.port must be a whole number"),
        ("server: {http: {port: 7777}}", "server.grpc.port is 7777, which server.http.port has"),
        ("server: 8080", "server must be a group of settings"),
        ("server: {host: 10.0.0.1}", "server.host must be 127.0.0.1"),
        ("server: {host: example.org}", "server.host must be 127.0.0.1"),
        ("server: {http: {body_bytes_max: 32MB}}", "must be a size, such as 65536"),
        ("storage: {path: 5}", "storage.path must be text; put the number in quotes"),
        ("storage: {path: on}", "YAML reads an unquoted on, off, yes or no as true or false"),
        ("bench: maybe", "bench must be true or false"),
        ("backends: []", "backends must have an entry"),
        ("backends: {name: a}", "backends must be a list"),
        ("backends: [{name: a}, {name: a}]", "backends[1].name 'a' is used twice"),
        ("backends: [{name: a}, {name: b}]", "namespaces[0].backend must name one of: a, b"),
        ("backends: [{name: a, driver: postgres}]", "write `driver: lance`"),
        ("backends: [{name: a, driver: lanc}]", "must be 'lance', 'memory' or 'postgres'"),
        ("tenant_isolation: true", "tenant_isolation must be False"),
        ("policy: {rules: [{name: a}]}", "policy.rules come with tokens in a later release"),
        ("policy: {default: deny}", "policy.default must be allow until"),
        ("engine: {seal_after: 60}", "must be a duration with a unit"),
        ("cluster: {retry_first: 2s}", "must not be shorter than cluster.retry_first"),
        ("engine: {transactions_kept: 0s}", "must be at least cluster.deadline, 30 s"),
    ],
)
def test_an_impossible_setting_is_refused(files: Files, yaml: str, words: str) -> None:
    line, problem = files.refusal(SMALL + yaml)
    assert words in problem
    assert line == 7 or "namespaces[0]" in problem


@pytest.mark.parametrize("host", ["localhost", "::1", "127.0.0.53"])
def test_every_loopback_address_starts(files: Files, host: str) -> None:
    assert files.load(f'{SMALL}server: {{host: "{host}"}}').server.host == host


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("shards: 65", "shards must be at most 64"),
        ("recall: 0.5", "recall must be more than 0.5"),
        ("recall: .nan", "recall must be"),
        ("text_search: englisch", "text_search must be simple or one of: arabic,"),
        ("history: {}", "history must be none, forever, or bounds"),
        ("history: {age: 7}", "history.age must be a duration with a unit"),
        ("history: {rows: 7}", "history.rows is not a setting; did you mean rows_max?"),
        ("history: {rows_max: -1}", "history.rows_max must be at least 0"),
        ("backend: other", "backend 'other' is not described under backends; it has: main"),
    ],
)
def test_an_impossible_namespace_is_refused(files: Files, yaml: str, words: str) -> None:
    line, problem = files.refusal(semantic(yaml))
    assert line == 7
    assert words in problem


@pytest.mark.parametrize("name", ["a b", '""', "a/b", "é", "x" * 64, "../x"])
def test_a_namespaces_name_is_plain(files: Files, name: str) -> None:
    line, problem = files.refusal(SMALL.replace("notes", name))
    assert line == 5
    assert "must be 1 to 63 characters" in problem


def test_a_namespace_is_described_once_a_block(files: Files) -> None:
    again = "  - {block: semantic, name: notes, embedder: {provider: fake, dimensions: 8}}\n"
    line, problem = files.refusal(SMALL + again)
    assert line == 7
    assert "semantic/notes is described twice" in problem
    assert len(files.load(SMALL + "  - {block: episodic, name: notes}\n").namespaces) == 2


def test_an_episodic_namespace_is_one_log_without_embedder(files: Files) -> None:
    line, problem = files.refusal(SMALL + "  - {block: episodic, name: log, shards: 2}\n")
    assert (line, "write 1" in problem) == (7, True)
    log = "  - {block: episodic, name: log, embedder: {provider: fake, dimensions: 8}}\n"
    assert "embeds nothing" in files.refusal(SMALL + log)[1]
    for setting in ("history: {age: 7d}", "recall: 0.95", "text_search: english"):
        log = f"  - {{block: episodic, name: log, {setting}}}\n"
        assert "is not searched" in files.refusal(SMALL + log)[1]


def test_a_log_keeps_what_its_retention_says(files: Files) -> None:
    text = SMALL + "  - {block: episodic, name: log, retention: {age: 30d, events: 1000}}\n"
    (log,) = files.load(text).grid_spec().logs
    assert (log.config.retention_age_s, log.config.retention_events) == (30 * 86_400.0, 1000)
    (log,) = files.load(SMALL + "  - {block: episodic, name: log}\n").grid_spec().logs
    assert (log.config.retention_age_s, log.config.retention_events) == (None, None)
    assert "only an episodic" in files.refusal(semantic("retention: {age: 30d}"))[1]
    for bad in ("{age: 0s}", "{events: 0}", "{rows: 3}", "none"):
        text = SMALL + f"  - {{block: episodic, name: log, retention: {bad}}}\n"
        assert files.refusal(text)[0] == 7


def test_a_semantic_namespace_needs_an_embedder(files: Files) -> None:
    line, problem = files.refusal(SMALL + "  - {block: semantic, name: b}\n")
    assert line == 7
    assert "needs one, for example `embedder: {provider: local" in problem


@pytest.mark.parametrize(
    ("embedder", "words"),
    [
        ("{provider: fake}", "dimensions is missing; write for example `dimensions: 384`"),
        ("{provider: fake, dimensions: 0}", "dimensions must be at least 1"),
        ("{provider: fake, dimensions: 32769}", "dimensions must be at most 32768"),
        ("{provider: opnai, dimensions: 8}", "did you mean openai?"),
        ("{provider: protocol, dimensions: 8}", "provider is not known"),
        ("{provider: openai, dimensions: 8}", "model is missing; name a model of openai"),
        ("{provider: ollama, dimensions: 8}", "model is missing; name a model of ollama"),
        (
            "{provider: openai, model: text-embedding-3-small, dimensions: 3072}",
            "has dimensions 3072, but text-embedding-3-small has 1536; write that",
        ),
        (
            "{provider: openai, model: text-embedding-ada-002, dimensions: 512}",
            "has dimensions 512, but text-embedding-ada-002 has 1536; write that",
        ),
        (
            "{provider: openai, model: m, dimensions: 8, options: {batch_text: 2}}",
            "did you mean batch_texts?",
        ),
        (
            "{provider: openai, model: m, dimensions: 8, options: {batch_texts: 0}}",
            "needs a whole number above 0 in options.batch_texts",
        ),
        (
            "{provider: ollama, model: m, dimensions: 8, options: {batch_tokens: 1.5}}",
            "needs a whole number above 0 in options.batch_tokens",
        ),
        (
            "{provider: ollama, model: m, dimensions: 8, options: {truncate: 1}}",
            "needs true or false in options.truncate",
        ),
        *(
            (
                f"{{provider: {name}, model: m, dimensions: 8, options: {{base_url: '{url}'}}}}",
                "has no address of a server in options.base_url",
            )
            for name in ("ollama", "openai")
            for url in ("http://h:x", "http://h:0", "http://h:99999", "http://300.0.0.1")
        ),
        ("{provider: local, dimensions: 8}", "all-MiniLM-L6-v2 has 384"),
        ("{provider: local, model: bge, dimensions: 384}", "let options.path name a folder"),
        ("{provider: fake, dimensions: 8, options: {tiemout: 3s}}", "did you mean timeout?"),
        ("{provider: fake, dimensions: 8, options: {timeout: 0s}}", "timeout must be more than 0"),
        ("{provider: fake, dimensions: 8, options: {replicas: 0}}", "replicas must be at least 1"),
    ],
)
def test_an_impossible_embedder_is_refused(files: Files, embedder: str, words: str) -> None:
    line, problem = files.refusal(SMALL.replace("{provider: fake, dimensions: 8}", embedder))
    assert line == 6
    assert words in problem


@pytest.mark.parametrize(
    ("yaml", "kept"),
    [
        ("none", History(0.0, None)),
        ("forever", History(None, None)),
        ("{age: 12h}", History(43_200.0, None)),
        ("{rows_max: 5}", History(None, 5)),
        ("{age: 7d, rows_max: 5}", History(604_800.0, 5)),
    ],
)
def test_history_is_none_forever_or_bounded(files: Files, yaml: str, kept: History) -> None:
    spec = files.load(semantic(f"history: {yaml}")).grid_spec()
    assert spec.namespaces[0].config.history == kept


@pytest.mark.parametrize(("size", "kept"), [(0, 4096), (7, 7), (-1, -1)])
def test_a_cache_of_0_is_the_default_and_a_negative_one_is_off(
    files: Files, size: int, kept: int
) -> None:
    text = SMALL.replace("dimensions: 8", f"dimensions: 8, cache_size: {size}")
    assert files.load(text).grid_spec().namespaces[0].cache_size == kept


def test_without_auth_it_does_not_start_and_says_what_to_write(files: Files) -> None:
    line, problem = files.refusal(SMALL.replace('auth: {mode: "off"}', ""))
    assert line == 3
    assert 'until then write `auth: {mode: "off"}`' in problem


@pytest.mark.parametrize("mode", ["off", "no", "token", "none", "null", "0"])
def test_only_an_explicit_off_turns_auth_off(files: Files, mode: str) -> None:
    line, problem = files.refusal(SMALL.replace('"off"', mode))
    assert line == 2
    assert 'auth.mode must be "off"' in problem
    assert ("in quotes; YAML reads an unquoted off as false" in problem) == (mode in ("off", "no"))


SECRET = "sk-4bcd"


@pytest.mark.parametrize(
    "options",
    [
        f"{{api_key: {SECRET}}}",
        f"{{api_key_env: {SECRET}}}",
        f"{{token: {SECRET}}}",
        f"{{headers: {{Authorization: {SECRET}}}}}",
        f"{{base_url: 'https://user:{SECRET}@host/'}}",
        f"{{timeout: {SECRET}}}",
        f"{{replicas: {SECRET}}}",
        f"{SECRET}",
    ],
)
def test_a_secret_in_the_file_is_refused_and_never_repeated(files: Files, options: str) -> None:
    embedder = f"{{provider: fake, dimensions: 8, options: {options}}}"
    line, problem = files.refusal(SMALL.replace("{provider: fake, dimensions: 8}", embedder))
    assert line == 6
    assert SECRET not in problem


def test_a_literal_key_is_told_where_to_go(files: Files) -> None:
    _, problem = files.refusal(
        SMALL.replace("dimensions: 8", f"dimensions: 8, options: {{api_key: {SECRET}}}")
    )
    assert "write the variable's name, as in `api_key_env: OPENAI_API_KEY`" in problem


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("bench: true\nauth: {}\nbench: false\n", 3, "'bench' is written twice, first on line 1"),
        ("server:\n  host: a\n  host: b\n", 3, "'host' is written twice, first on line 2"),
        ("server: {host: a\n", 2, "this is not YAML"),
        ("a:\n\tb: 1\n", 2, "this is not YAML"),
        ("- a\n- b\n", 1, "not a list"),
        ("just words\n", 1, "not a list or a text"),
        ("on: 1\n", 1, "must be a word"),
        ("? [a, b]\n: 1\n", 1, "must be a plain word"),
        ("a: 1\n---\nb: 2\n", 2, "this is not YAML"),
        (b"a: 1\nb: \xff\n", 2, "this is not UTF-8"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "this is not YAML"),
        ("", 1, "auth is missing"),
    ],
)
def test_what_is_no_proper_yaml_is_refused_with_its_line(
    files: Files, text: str | bytes, line: int, words: str
) -> None:
    at, problem = files.refusal(text)
    assert words in problem
    assert at == line


def test_a_file_that_unfolds_without_end_is_refused(files: Files) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 10):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    with pytest.raises(ConfigError, match="holds over"):
        files.load("\n".join(lines))


def test_anchors_and_merges_may_share_a_part(files: Files) -> None:
    text = SMALL.replace("embedder: {", "embedder: &model {")
    second = "  - {block: semantic, name: b, embedder: {<<: *model, dimensions: 9}}\n"
    settings = files.load(text + second)
    assert [space.embedder.dimensions for space in settings.namespaces if space.embedder] == [8, 9]


def test_a_missing_file_says_what_to_copy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; copy deploy/mindgrid\.yaml"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"), [("500ms", 0.5), ("30s", 30.0), ("1h30m", 5400.0), ("7d", 604_800.0)]
)
def test_durations_have_units(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)
    assert seconds(duration_text(value)) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "30", "30 s", "s", "-1s", "1s5", "1e3s", "9" * 400 + "d", 30])
def test_anything_else_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        seconds(text)


@pytest.mark.parametrize(("text", "value"), [(7, 7), ("64KiB", 65_536), ("32MiB", 2**25), ("9", 9)])
def test_sizes_are_bytes_or_have_a_unit(text: object, value: int) -> None:
    assert byte_count(text) == value
    assert byte_count(bytes_text(value)) == value
