"""What the server's operator can choose, and where it may be written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ContractError
from ..options import SplitOptions, check_partial_dtype, check_single_split_chunks

CONFIG_KEY = "densemla"
"""Key of densemla's table in vLLM's ``--additional-config``."""

_KEYS = ("partial_dtype", "single_split_chunks", "num_splits", "backend")


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Options of a serving process.

    Attributes:
        split: partial dtype and one-split threshold.
        num_splits: the exact number of splits for every batch size; None leaves it to the plan.
        backend: densemla backend, ``"auto"`` or a name from ``densemla.backend_names()``.
    """

    split: SplitOptions = field(default_factory=SplitOptions)
    num_splits: int | None = None
    backend: str = "auto"

    @classmethod
    def resolve(cls, additional_config: object, environ: Mapping[str, str] | None = None) -> ServingOptions:
        """Read ``additional_config["densemla"]`` over the two environment variables: what is written wins.

        Args:
            additional_config: vLLM's ``VllmConfig.additional_config``. Its ``densemla`` table may hold
                ``partial_dtype`` (``"bf16"`` or ``"fp32"``), ``single_split_chunks`` (int), ``num_splits``
                (int) and ``backend`` (str).
            environ: environment; ``os.environ`` when None.

        Raises:
            ContractError: an unknown key or a value that it does not take, here or in the environment.
        """
        split = SplitOptions.from_env(environ)
        table = additional_config.get(CONFIG_KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(table, Mapping):
            raise ContractError(f"additional_config[{CONFIG_KEY!r}]", "a table of options", repr(table))
        for key in table:
            if key not in _KEYS:
                raise ContractError(_name(key), "one of the options " + ", ".join(_KEYS), repr(key))
        num_splits = table.get("num_splits")
        if num_splits is not None and (isinstance(num_splits, bool) or not isinstance(num_splits, int)):
            raise ContractError(_name("num_splits"), "an int", repr(num_splits))
        backend = table.get("backend", "auto")
        if not isinstance(backend, str):
            raise ContractError(_name("backend"), "the name of a densemla backend", repr(backend))
        return cls(
            SplitOptions(
                check_partial_dtype(table.get("partial_dtype", split.partial_dtype), _name("partial_dtype")),
                check_single_split_chunks(
                    table.get("single_split_chunks", split.single_split_chunks), _name("single_split_chunks")
                ),
            ),
            num_splits,
            backend,
        )


def _name(key: object) -> str:
    return f"additional_config[{CONFIG_KEY!r}][{key!r}]"
