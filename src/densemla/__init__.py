"""densemla: dense MLA decode over a paged latent cache, with the split precision as your choice."""

from . import device, kv_cache, splits
from .backends import backend_names
from .binding import Binding, bind
from .caps import Caps
from .decoding import compile, decode, run
from .errors import ContractError
from .merging import merge
from .options import SplitOptions
from .planning import Plan, ScratchSpec, plan

__version__ = "0.1.0"

__all__ = [
    "Binding",
    "Caps",
    "ContractError",
    "Plan",
    "ScratchSpec",
    "SplitOptions",
    "__version__",
    "backend_names",
    "bind",
    "compile",
    "decode",
    "device",
    "kv_cache",
    "merge",
    "plan",
    "run",
    "splits",
]
