"""The vLLM plugin: installed beside vLLM, densemla decodes for every dense MLA model that vLLM serves.

vLLM finds :func:`register` through the entry point group ``vllm.general_plugins`` and calls it in every
process. On the CPU platform densemla then takes the place of ``CPU_MLA``; on a GPU it is a backend of its
own, chosen with ``--attention-backend DENSEMLA``. Prefill stays vLLM's.

This module and :mod:`densemla.vllm.options`, :mod:`densemla.vllm.steps` need no vLLM; the others import it.
"""

from __future__ import annotations

from .registration import BACKEND_NAME, PLUGIN_GROUP, SUPPORTED_VLLM, PluginStatus, register, status

__all__ = ["BACKEND_NAME", "PLUGIN_GROUP", "SUPPORTED_VLLM", "PluginStatus", "register", "status"]
