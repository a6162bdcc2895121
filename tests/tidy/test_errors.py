"""Each error of the tree crosses processes unchanged, and answers with a status of its own."""

from __future__ import annotations

import inspect
import pickle

import pytest

from mindgrid.api.wire import status
from mindgrid.shards import errors
from mindgrid.shards.errors import CallerError, MindgridError, OperatorError, RetryError

BRANCHES = {MindgridError, CallerError, RetryError, OperatorError}
RAISED = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, MindgridError) and kind not in BRANCHES
]
SAMPLES: dict[str, str | int | float] = {"str": "naïve 'text'", "int": 2**40, "float": 0.25}


def _sample(kind: type[MindgridError]) -> MindgridError:
    """Return the error with a value of the right type in each field."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return kind(*(SAMPLES[str(parameter.annotation)] for parameter in parameters))


@pytest.mark.parametrize("kind", RAISED)
def test_an_error_survives_pickling(kind: type[MindgridError]) -> None:
    error = _sample(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


@pytest.mark.parametrize("kind", RAISED)
def test_an_error_survives_being_packed(kind: type[MindgridError]) -> None:
    error = _sample(kind)
    copy = errors.unpack(*errors.pack(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("kind", RAISED)
def test_an_error_has_a_status_and_keeps_its_words(kind: type[MindgridError]) -> None:
    error = _sample(kind)
    found = status.of(error)
    assert found.message == str(error), "status.py does not know it"
    assert found.code in status.HTTP
    assert 400 <= found.http <= 599


@pytest.mark.parametrize("kind", RAISED)
def test_the_tree_at_the_head_of_the_module_shows_an_error(kind: type[MindgridError]) -> None:
    assert f"── {kind.__name__} " in (errors.__doc__ or "")
    assert kind.__mro__[1] in BRANCHES, "it says who can act"
