"""``densemla dspark``: serve a draft, show one at work, make keys."""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console

from ..device import check_arch, usable
from ..errors import USER_ERROR, ContractError
from .checkpoint import CheckpointError, identity, load_draft

if TYPE_CHECKING:
    from .server import DraftServer

app = typer.Typer(no_args_is_help=True, help="Remote DSpark drafting: a draft server, and a demo of one.")

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

err = Console(stderr=True)


def _stop(message: object, status: int = USER_ERROR) -> typer.Exit:
    # Without markup: a message may hold brackets, as "densemla[dspark]".
    err.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(status)


def check_device(name: str | torch.device) -> None:
    """Refuse a CUDA device that this torch build has no code for, before anything is loaded onto it.

    Raises:
        ContractError: there is no such device, or no code for it.
    """
    device = usable(name)
    if device.type == "cpu":
        return
    gpu = torch.cuda.get_device_name(device)
    check = check_arch(torch.cuda.get_device_capability(device), torch.cuda.get_arch_list(), device=gpu)
    if not check:
        raise ContractError("device", "a GPU that this torch build has code for", check.message)


def _address(http: str) -> tuple[str, int] | None:
    if http == "off":
        return None
    host, separator, port = http.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise ContractError("--http", "HOST:PORT, or off", repr(http))
    return host.strip("[]"), int(port)


@app.command()
def serve(
    draft: Annotated[Path, typer.Option(help="Folder of the draft's checkpoint (config.json and safetensors).")],
    target: Annotated[
        Path | None,
        typer.Option(help="Folder of the target's checkpoint, for its embedding and LM head. Default: the draft's."),
    ] = None,
    bind: Annotated[
        str, typer.Option(help="ZeroMQ address. Other hosts can be served only with CURVE keys.")
    ] = "tcp://127.0.0.1:9470",
    http: Annotated[str, typer.Option(help="HOST:PORT of /health and /metrics, or off.")] = "127.0.0.1:9471",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="bf16 or fp32: weights, cache and arithmetic.")] = "bf16",
    kv_mib: Annotated[
        float, typer.Option(min=0.01, max=1e9, help="Budget of the paged cache; old requests make room.")
    ] = 1024,
    depth: Annotated[int | None, typer.Option(min=1, help="Tokens per proposal. Default: the block size.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Most requests in a call.")] = 64,
    curve_key: Annotated[Path | None, typer.Option(help="The server's .key_secret file.")] = None,
    curve_verifiers: Annotated[Path | None, typer.Option(help="Folder of the verifiers' .key files.")] = None,
    drain: Annotated[float, typer.Option(min=0, help="Most seconds to go on answering calls after SIGTERM.")] = 2.0,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads of torch.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when ready.")] = False,
) -> None:
    """Serve a draft until SIGTERM or Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        server = _start(
            draft, target or draft, bind, http, device, dtype, int(kv_mib * (1 << 20)), depth, max_batch, curve_key,
            curve_verifiers, drain,
        )  # fmt: skip
    except (CheckpointError, ContractError, ImportError, OSError, ValueError) as error:
        raise _stop(error) from error
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    if as_json:
        print(json.dumps({**server.health(), "http": server.http}), flush=True)
    else:
        out = Console()
        out.print(f"drafting at {server.endpoint}, checkpoint {server.engine.geometry.checkpoint}", soft_wrap=True)
        if server.http is not None:
            out.print(f"http://{server.http[0]}:{server.http[1]}/health and /metrics", soft_wrap=True)
    server.run()


def _start(
    draft: Path,
    target: Path,
    bind: str,
    http: str,
    device: str,
    dtype: str,
    kv_bytes: int,
    depth: int | None,
    max_batch: int,
    curve_key: Path | None,
    curve_verifiers: Path | None,
    drain: float,
) -> DraftServer:
    from .engine import DraftEngine  # noqa: PLC0415  # the dspark extra
    from .server import CurveServer, DraftServer  # noqa: PLC0415  # the dspark extra

    if dtype not in _DTYPES:
        raise ContractError("--dtype", " or ".join(_DTYPES), repr(dtype))
    if (curve_key is None) != (curve_verifiers is None):
        raise ContractError("--curve-key and --curve-verifiers", "both or neither", "one of them")
    curve = None if curve_key is None or curve_verifiers is None else CurveServer(curve_key, curve_verifiers)
    address = _address(http)
    check_device(device)
    model = load_draft(draft, target, dtype=_DTYPES[dtype], device=device)
    if depth is not None and depth > model.config.block_size:
        raise ContractError("--depth", f"at most the draft's block size of {model.config.block_size}", depth)
    engine = DraftEngine(model, checkpoint=identity(draft), kv_bytes=kv_bytes, depth=depth, max_batch=max_batch)
    return DraftServer(engine, bind, curve=curve, http=address, drain_seconds=drain)


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1, help="Training time, if no trained pair is cached.")] = 60.0,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 256,
    prompts: Annotated[int, typer.Option(min=1, max=64, help="Prompts, generated one after another.")] = 4,
    retrain: Annotated[bool, typer.Option(help="Train even if a pair is cached.")] = False,
    cache: Annotated[Path | None, typer.Option(help="Where the pair is kept. Default: the user's cache.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Stop each training after so many steps.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train a tiny pair, serve its draft from a second process, and generate with and without it."""
    try:
        from .demo import DemoError, default_cache, run_demo  # noqa: PLC0415  # the dspark extra
    except ImportError as error:
        raise _stop(error) from error
    try:
        outcome = run_demo(
            cache or default_cache(), seconds, tokens, prompts, retrain=retrain, max_steps=max_steps, console=err
        )
    except (DemoError, CheckpointError) as error:
        raise _stop(error, 1) from error
    if as_json:
        print(json.dumps(outcome.to_json()))
    else:
        out = Console()
        out.print(outcome.table())
        out.print(outcome.sample[:240], style="dim", markup=False, highlight=False)
    if not outcome.equal:
        raise _stop("the drafted tokens differ from plain greedy decoding", 1)


@app.command()
def keygen(
    folder: Annotated[Path, typer.Argument(help="Where the keys go.")],
    name: Annotated[str, typer.Argument(help="server, or a name for a verifier.")],
) -> None:
    """Make a CURVE key pair: NAME.key to hand out, NAME.key_secret to keep."""
    try:
        from ._extra import zmq  # noqa: PLC0415  # the dspark extra
    except ImportError as error:
        raise _stop(error) from error
    if not name or Path(name).name != name:
        raise _stop(f"name: expected the name of a file without its folder, got {name!r}")
    for path in (folder / f"{name}.key", folder / f"{name}.key_secret"):
        if path.exists():
            raise _stop(f"{path} exists already: choose another name or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    public, secret = zmq.auth.create_certificates(str(folder), name)
    Path(secret).chmod(0o600)
    print(public, secret, sep="\n")


if __name__ == "__main__":
    app()
