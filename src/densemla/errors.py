"""The one exception that bad input raises."""

from __future__ import annotations

USER_ERROR = 2
"""Exit status of the commands for input that can't be used, as for a wrong option."""


class ContractError(ValueError):
    """A caller broke the contract.

    Attributes:
        argument: name of the argument, field or environment variable at fault.
        expected: what the contract asks for.
        got: what came instead.
    """

    def __init__(self, argument: str, expected: str, got: object) -> None:
        self.argument = argument
        self.expected = expected
        self.got = got
        super().__init__(f"{argument}: expected {expected}, got {got}")

    def __reduce__(self) -> tuple[type[ContractError], tuple[str, str, object]]:
        # BaseException would replay the message alone; as text, `got` can be pickled whatever it was.
        return type(self), (self.argument, self.expected, str(self.got))
