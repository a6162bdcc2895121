"""The settings model: every setting with its type, its bounds, its default and a sentence on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from mindgrid.cluster.embedders import registry
from mindgrid.cluster.embedders.protocol import (
    CACHE_SIZE_DEFAULT,
    EmbedderOptions,
    EmbedderSpec,
    Embedding,
)
from mindgrid.cluster.settings.quantities import byte_count, seconds
from mindgrid.cluster.spec import (
    EPISODIC,
    SEMANTIC,
    Bounds,
    GridSpec,
    LogSpec,
    NamespaceKey,
    NamespaceSpec,
)
from mindgrid.shards.analysis import LANGUAGES, SIMPLE
from mindgrid.shards.config import Driver, History, ShardConfig
from mindgrid.shards.episodic.types import LogConfig
from mindgrid.shards.types import Space

T = TypeVar("T")

ENV_PREFIX = "MINDD_"
SHARDS_MAX = 64
DIMENSIONS_MAX = 32_768


def _no_bool(value: object) -> object:
    """Keep YAML's `yes` and `on` from becoming the number 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Duration = Annotated[float, BeforeValidator(seconds)]
Bytes = Annotated[int, BeforeValidator(byte_count)]
Whole = Annotated[int, BeforeValidator(_no_bool)]
Port = Annotated[Whole, Field(ge=1, le=65_535)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Section(BaseModel):
    """A part of the settings; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Http(Section):
    """The HTTP door."""

    port: Port = Field(default=8080, description="Port of the HTTP door.")
    body_bytes_max: Annotated[Bytes, Field(ge=1024, le=2**30)] = Field(
        default=32 * 2**20,
        description="Largest request body; a larger one is answered with 413.",
        examples=["32MiB"],
    )


class Grpc(Section):
    """The gRPC door."""

    port: Port = Field(default=7777, description="Port of the gRPC door.")


class Server(Section):
    """Where clients come in."""

    host: Text = Field(
        default="127.0.0.1",
        description="Address both doors listen on. Without tokens only a loopback address starts.",
    )
    http: Http = Field(default=Http(), description="The HTTP door.")
    grpc: Grpc = Field(default=Grpc(), description="The gRPC door.")
    replicas: Annotated[Whole, Field(ge=1, le=256)] = Field(
        default=1,
        description="Front replicas: processes that decode, route and merge.",
    )


class Storage(Section):
    """Where everything is kept."""

    path: Text = Field(
        default="mindgrid-data",
        description="Folder of all data, absolute or from the folder the server is started in.",
    )


class Auth(Section):
    """Who may call."""

    mode: Literal["off"] = Field(
        description='Only "off", in quotes, until a later release brings tokens.',
        examples=["off"],
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        if value is False:
            raise ValueError(
                'must be "off" in quotes; YAML reads an unquoted off as false, and so that '
                "nobody turns authentication off by accident only the word itself counts"
            )
        if value != "off":
            raise ValueError(
                'must be "off", in quotes; tokens come with a later release, and until then the '
                "server starts only without them and on a loopback server.host"
            )
        return value


class Policy(Section):
    """What authenticated callers may do."""

    default: Literal["allow", "deny"] = Field(
        default="allow",
        description="What happens to a call that no rule decides.",
    )
    rules: tuple[dict[str, Any], ...] = Field(
        default=(),
        description="Ordered rules. They come with tokens in a later release.",
    )


class Backend(Section):
    """A way to keep rows, under a name that namespaces refer to."""

    name: Text = Field(description="Any name; namespaces refer to it.", examples=["main"])
    driver: Literal["lance", "memory", "postgres"] = Field(
        default="lance",
        description="`lance` keeps rows on disk; `memory` in RAM, for tests, gone after a stop.",
    )


class HistorySettings(Section):
    """How much of the past stays readable by `known_at`."""

    age: Annotated[Duration, Field(ge=0)] | None = Field(
        default=None,
        description="Rows replaced longer ago than this may go.",
        examples=["7d"],
    )
    rows_max: Annotated[Whole, Field(ge=0)] | None = Field(
        default=None,
        description="Number of rows of a shard past which the oldest replaced ones may go.",
    )

    @model_validator(mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        if value == "none":
            return {"age": "0s"}
        if value == "forever":
            return {"age": None, "rows_max": None}
        if not isinstance(value, dict | HistorySettings) or not value:
            raise ValueError(
                "must be none, forever, or bounds such as {age: 7d, rows_max: 1000000}"
            )
        return value


class Options(BaseModel):
    """How a model is reached. A provider may know more options than these."""

    model_config = ConfigDict(extra="allow", frozen=True)

    timeout: Annotated[Duration, Field(gt=0, le=3600)] = Field(
        default=30.0,
        description="How long one batch of texts may take.",
        examples=["30s"],
    )
    base_url: Annotated[str, StringConstraints(max_length=2048)] = Field(
        default="",
        description="Address of the model's server, without credentials; empty for the "
        "provider's own.",
        examples=["http://localhost:11434"],
    )
    api_key_env: Annotated[str, StringConstraints(max_length=256)] = Field(
        default="",
        description="Name of the environment variable that holds the key; never the key itself.",
        examples=["OPENAI_API_KEY"],
    )
    path: str = Field(
        default="",
        description="For `local`: a folder with model.onnx and tokenizer.json; "
        "empty for the packaged model.",
    )
    replicas: Annotated[Whole, Field(ge=1, le=64)] = Field(
        default=1,
        description="For `local`: processes that embed, one thread each.",
    )

    def more(self) -> dict[str, Any]:
        """Return the options that only the provider knows."""
        return dict(self.model_extra or {})

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if value and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) is None:
            raise ValueError(
                "must be the name of an environment variable, such as OPENAI_API_KEY, "
                "not the key itself"
            )
        return value

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if value and re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", value) is None:
            raise ValueError(
                "must be an http:// or https:// address without user, password, query or fragment"
            )
        return value


class Embedder(Section):
    """The model that turns a namespace's text into vectors."""

    provider: Text = Field(
        description="`local` (a model in this cluster, which reads the first 256 tokens of a text, "
        "some 200 English words, and no further), `openai` (OpenAI or a server that speaks like "
        "it) and `ollama` (a server of Ollama), which refuse a text that is too long for the "
        "model, `fake` (for tests).",
        examples=["local"],
    )
    model: Annotated[str, StringConstraints(max_length=256)] = Field(
        default="",
        description="The model's name; part of the identity of its vectors.",
        examples=["all-MiniLM-L6-v2"],
    )
    revision: Annotated[str, StringConstraints(max_length=256)] = Field(
        default="",
        description="The model's revision; part of the identity of its vectors.",
    )
    dimensions: Annotated[Whole, Field(ge=1, le=DIMENSIONS_MAX)] = Field(
        description="Length of its vectors.",
        examples=[384],
    )
    cache_size: Annotated[Whole, Field(ge=-(2**31), le=10_000_000)] = Field(
        default=0,
        description="Texts whose vectors are kept in each process; 0 stands for 4,096, a negative "
        "number for none. A kept vector costs 4 bytes a dimension.",
    )
    options: Options = Field(default=Options(), description="How the model is reached.")


class Retention(Section):
    """What an episodic namespace keeps. Past either bound the oldest events are removed."""

    age: Annotated[Duration, Field(gt=0)] | None = Field(
        default=None,
        description="Events older than this are removed within seconds, their dedup keys too; left "
        "out: none.",
        examples=["30d"],
    )
    events: Annotated[Whole, Field(ge=1)] | None = Field(
        default=None,
        description="All but the newest so many events are removed, likewise; left out: none.",
        examples=["1000000"],
    )


class Namespace(Section):
    """One named memory."""

    block: Literal["semantic", "episodic", "memory"] = Field(
        description="What kind of memory it is.",
        examples=["semantic"],
    )
    name: str = Field(
        description="1 to 63 of a-z, A-Z, 0-9, _ and -; unique within its block.",
        examples=["notes"],
    )
    backend: str = Field(
        default="",
        description="Name of a backend; may be left out where there is only one.",
    )
    shards: Annotated[Whole, Field(ge=1, le=SHARDS_MAX)] = Field(
        default=1,
        description="Slices that are searched in parallel. An episodic namespace has one.",
    )
    text_search: str = Field(
        default=SIMPLE,
        description="How words are found: `simple`, or a Snowball language to stem in.",
        examples=["english"],
    )
    history: HistorySettings = Field(
        default=HistorySettings(age="7d"),  # type: ignore[arg-type]  # a duration, as in YAML,
        description="How far back `known_at` reaches: none, forever, or {age, rows_max}, "
        "where the nearer bound counts.",
        examples=["{age: 7d}"],
    )
    retention: Retention = Field(
        default=Retention(),
        description="What an episodic namespace keeps.",
        examples=["{age: 30d}"],
    )
    recall: Annotated[float, BeforeValidator(_no_bool), Field(gt=0.5, le=1.0)] = Field(
        default=0.95,
        description="Share of the true top 10 that an approximate search finds on average.",
    )
    embedder: Embedder | None = Field(
        default=None,
        description="The model of a semantic namespace.",
        examples=["{provider: local, …}"],
    )

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if re.fullmatch(r"[a-zA-Z0-9_-]{1,63}", value) is None:
            raise ValueError("must be 1 to 63 characters of a-z, A-Z, 0-9, _ and -")
        return value

    @field_validator("text_search")
    @classmethod
    def _is_a_language(cls, value: str) -> str:
        if value != SIMPLE and value not in LANGUAGES:
            raise ValueError(f"must be {SIMPLE} or one of: {', '.join(LANGUAGES)}")
        return value


def _default(owner: type[Any], name: str) -> Any:
    """Return a dataclass field's default, so that it is written down once."""
    value = next(field.default for field in fields(owner) if field.name == name)
    assert value is not MISSING
    return value


class Engine(Section):
    """Bounds inside a shard. The defaults fit nearly everybody."""

    seal_rows: Annotated[Whole, Field(ge=1, le=1_000_000)] = Field(
        default=_default(ShardConfig, "seal_rows"),
        description="Rows in RAM that become a segment on disk.",
    )
    seal_after: Annotated[Duration, Field(gt=0)] = Field(
        default=_default(ShardConfig, "seal_after_s"),
        description="Rows in RAM become a segment after this time too, or a twelfth of it "
        "without a write, once an eighth is there.",
        examples=["60s"],
    )
    exact_rows_max: Annotated[Whole, Field(ge=0, le=100_000_000)] = Field(
        default=_default(ShardConfig, "exact_rows_max"),
        description="A search that may return at most so many rows compares all of them.",
    )
    index_rows_min: Annotated[Whole, Field(ge=1)] = Field(
        default=_default(ShardConfig, "index_rows_min"),
        description="Rows on disk from which a shard gets an approximate index.",
    )
    purge_after: Annotated[Duration, Field(ge=0)] = Field(
        default=_default(ShardConfig, "purge_after_s"),
        description="The bytes of hard-deleted records leave the disk after this time.",
        examples=["1h"],
    )
    merge_fanout: Annotated[Whole, Field(ge=2, le=64)] = Field(
        default=_default(ShardConfig, "merge_fanout"),
        description="So many segments of similar size are merged into one.",
    )
    group_rows_max: Annotated[Whole, Field(ge=1, le=1_000_000)] = Field(
        default=_default(ShardConfig, "group_rows_max"),
        description="Rows that are made durable together at most.",
    )
    journal_bytes_max: Annotated[Bytes, Field(ge=2**20)] = Field(
        default=_default(ShardConfig, "journal_bytes_max"),
        description="A journal of this size is sealed whatever the number of its rows.",
        examples=["256MiB"],
    )
    transactions_kept: Annotated[Duration, Field(ge=0)] = Field(
        default=_default(ShardConfig, "transactions_kept_s"),
        description="How long a repeated transaction id returns the first result; "
        "at least cluster.deadline.",
        examples=["10m"],
    )


class Cluster(Section):
    """Bounds between a caller and the shards. The defaults fit nearly everybody."""

    hosts: Annotated[Whole, Field(ge=0, le=1024)] = Field(
        default=_default(GridSpec, "hosts"),
        description="Processes that hold shards; 0 stands for one per two cores.",
    )
    deadline: Annotated[Duration, Field(gt=0, le=86_400)] = Field(
        default=_default(Bounds, "deadline_s"),
        description="Time a call has if its caller sets none.",
        examples=["30s"],
    )
    quick_calls: Annotated[Whole, Field(ge=1, le=64)] = Field(
        default=_default(Bounds, "quick_calls"),
        description="Calls of the quick lane under way to one host.",
    )
    batch_queries: Annotated[Whole, Field(ge=1, le=1024)] = Field(
        default=_default(Bounds, "batch_queries"),
        description="Queries that travel in one call at most.",
    )
    heavy_top_k: Annotated[Whole, Field(ge=1, le=10_000)] = Field(
        default=_default(Bounds, "heavy_top_k"),
        description="A search for more hits than this takes the heavy lane.",
    )
    waiting_max: Annotated[Whole, Field(ge=1)] = Field(
        default=_default(Bounds, "waiting_max"),
        description="Queries of one namespace that may wait in a lane; more are refused.",
    )
    write_calls: Annotated[Whole, Field(ge=1, le=64)] = Field(
        default=_default(Bounds, "write_calls"),
        description="Calls with writes under way to one host.",
    )
    batch_writes: Annotated[Whole, Field(ge=1, le=4096)] = Field(
        default=_default(Bounds, "batch_writes"),
        description="Commits that travel in one call at most.",
    )
    batch_bytes: Annotated[Bytes, Field(ge=65_536, le=2**30)] = Field(
        default=_default(Bounds, "batch_bytes"),
        description="Bytes of drafts that travel in one call at most.",
        examples=["8MiB"],
    )
    writes_max: Annotated[Whole, Field(ge=1)] = Field(
        default=_default(Bounds, "writes_max"),
        description="Commits of one namespace that may wait; more are refused.",
    )
    attempts: Annotated[Whole, Field(ge=1, le=100)] = Field(
        default=_default(Bounds, "attempts"),
        description="How often a call is tried while its shard is unavailable.",
    )
    retry_first: Annotated[Duration, Field(gt=0)] = Field(
        default=_default(Bounds, "retry_first_s"),
        description="Pause before the first repetition; each further one is longer.",
        examples=["50ms"],
    )
    retry_most: Annotated[Duration, Field(gt=0)] = Field(
        default=_default(Bounds, "retry_most_s"),
        description="Longest pause between two tries.",
        examples=["1s"],
    )
    silence_max: Annotated[Duration, Field(gt=0, le=3600)] = Field(
        default=_default(Bounds, "silence_max_s"),
        description="A host that does not answer for so long is ended and started anew.",
        examples=["15s"],
    )
    skew_max: Annotated[Duration, Field(gt=0, le=10)] = Field(
        default=_default(Bounds, "skew_max_s"),
        description="Largest difference between two machines' clocks that is accepted; "
        "a shard's first write after a start waits as long.",
        examples=["250ms"],
    )


class Settings(BaseSettings):
    """All settings. Variables such as `MINDD_SERVER__HTTP__PORT` override the file."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        validate_default=False,
    )

    server: Server = Field(default=Server(), description="Where clients come in.")
    storage: Storage = Field(default=Storage(), description="Where everything is kept.")
    auth: Auth = Field(description="Who may call.", examples=['{mode: "off"}'])
    policy: Policy = Field(default=Policy(), description="What callers may do.")
    tenant_isolation: Literal[False] = Field(
        default=False,
        description="Keeps tenants apart in storage. Comes with tokens in a later release.",
    )
    backends: tuple[Backend, ...] = Field(
        default=(Backend(name="main"),),
        description="Ways to keep rows.",
        min_length=1,
    )
    namespaces: tuple[Namespace, ...] = Field(
        description="The memories this server has.",
        examples=["[{block: semantic, name: notes, embedder: …}]"],
        min_length=1,
        max_length=100_000,
    )
    engine: Engine = Field(default=Engine(), description="Bounds inside a shard.")
    cluster: Cluster = Field(
        default=Cluster(), description="Bounds between a caller and the shards."
    )
    bench: bool = Field(
        default=False,
        description="Opens a route with a constant answer, which `make bench` compares with.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let the environment override the file, and read nothing else."""
        return env_settings, init_settings

    def grid_spec(self) -> GridSpec:
        """Return what the cluster is told; namespaces of block memory are not built yet."""
        return GridSpec(
            storage=Path(self.storage.path).absolute(),
            namespaces=tuple(self._namespace_specs()),
            hosts=self.cluster.hosts,
            bounds=_filled(Bounds, self.cluster),
            logs=tuple(self._log_specs()),
        )

    def embeddings(self) -> dict[NamespaceKey, Embedding]:
        """Return how each namespace embeds that does."""
        return {
            NamespaceKey(space.block, space.name): Embedding(
                embedder_spec(space.embedder),
                space.embedder.cache_size or CACHE_SIZE_DEFAULT,
            )
            for space in self.namespaces
            if space.embedder is not None
        }

    def _log_specs(self) -> Iterator[LogSpec]:
        for space in self.namespaces:
            if space.block == EPISODIC:
                config = LogConfig(
                    seal_events=self.engine.seal_rows,
                    seal_after_s=self.engine.seal_after,
                    merge_fanout=self.engine.merge_fanout,
                    retention_age_s=space.retention.age,
                    retention_events=space.retention.events,
                    purge_after_s=self.engine.purge_after,
                    group_events_max=self.engine.group_rows_max,
                    transactions_kept_s=self.engine.transactions_kept,
                    journal_bytes_max=self.engine.journal_bytes_max,
                )
                yield LogSpec(NamespaceKey(space.block, space.name), config, self._driver(space))

    def _driver(self, space: Namespace) -> Driver:
        drivers = {backend.name: Driver(backend.driver) for backend in self.backends}
        return drivers[space.backend or self.backends[0].name]

    def _namespace_specs(self) -> Iterator[NamespaceSpec]:
        embeddings = self.embeddings()
        for space in self.namespaces:
            key = NamespaceKey(space.block, space.name)
            if space.block != SEMANTIC:
                continue
            assert space.embedder is not None, "the relations were checked"
            config = _filled(
                ShardConfig,
                self.engine,
                space=embeddings[key].spec.space,
                recall=space.recall,
                history=History(space.history.age, space.history.rows_max),
                text_search=space.text_search,
                skew_max_s=self.cluster.skew_max,
            )
            yield NamespaceSpec(
                key=key,
                config=config,
                driver=self._driver(space),
                shards=space.shards,
                cache_size=embeddings[key].cache_size,
                embedder=embeddings[key].spec.options,
            )


def embedder_spec(embedder: Embedder) -> EmbedderSpec:
    """Return the model and how it is reached, as the embedders take it."""
    options = embedder.options
    model = embedder.model or registry.find(embedder.provider).model_default
    return EmbedderSpec(
        space=Space(embedder.provider, model, embedder.revision, embedder.dimensions),
        options=EmbedderOptions(
            timeout_s=options.timeout,
            base_url=options.base_url,
            api_key_env=options.api_key_env,
            path=str(Path(options.path).absolute()) if options.path else "",
            replicas=options.replicas,
            more=tuple(sorted((key, str(value)) for key, value in options.more().items())),
        ),
    )


def _filled(kind: type[T], section: Section, **more: object) -> T:
    """Return the dataclass with the section's values; a duration's field ends with `_s`.

    A field without a setting keeps its default; a test says which those are.
    """
    names = {field.name: field.name.removesuffix("_s") for field in fields(kind)}  # type: ignore[arg-type]
    values = {
        field: getattr(section, setting)
        for field, setting in names.items()
        if setting in type(section).model_fields and field not in more
    }
    return kind(**values, **more)
