"""Keep no secret: an allow-list of environment variables, and no name or value that may be a password."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tracedoc.collector.probe import MAX_VALUE_LENGTH

_NAME = re.compile(
    # Not tokenizers, max_tokens, authors or num_key_value_heads.
    r"TOKEN(?!IZ|S)|SECRET|PASSW|CREDENTIAL|AUTH(?!OR)|API_?KEY|ACCESS_?KEY|PRIVATE|(?:^|_)KEY(?!_VALUE)(?:_|$)"
)
_VALUE = re.compile(
    r"://[^/\s]*@"  # a password in a URL
    r"|-----BEGIN"
    r"|\b(?:sk|pk|rk|hf|gh[pousr]|github_pat|glpat|xox[abprs]|ya29|wandb|nvapi)[-_][A-Za-z0-9]"
    r"|\b(?:AKIA|ASIA|AIza|eyJ)[A-Za-z0-9_-]{10}"
    r"|\b[0-9a-fA-F]{32,}\b"
)
# A long run of letters and digits that no word, path or list of devices has.
_RUN = re.compile(r"[A-Za-z0-9+=]{20,}")
# CUDA_VISIBLE_DEVICES may hold them, and a GPU's number opens nothing.
_DEVICE_ID = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}(?:/\d+/\d+)?")


def names_secret(name: str) -> bool:
    """True if a variable, or an option such as ``--hub-token``, is named like one with a secret."""
    return _NAME.search(name.upper().replace("-", "_")) is not None


def looks_secret(value: str) -> bool:
    """True if a value may be a key, a token or a password."""
    value = _DEVICE_ID.sub("", value)
    if _VALUE.search(value):
        return True
    return any(any(c.isdigit() for c in run) and any(c.isalpha() for c in run) for run in _RUN.findall(value))


NAMES = frozenset(
    {
        "AMD_SERIALIZE_COPY",
        "AMD_SERIALIZE_KERNEL",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "CUDA_VISIBLE_DEVICES",
        "GLOO_SOCKET_IFNAME",
        "GOMP_CPU_AFFINITY",
        "GPU_MAX_HW_QUEUES",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "HIP_LAUNCH_BLOCKING",
        "HIP_VISIBLE_DEVICES",
        "HSA_ENABLE_SDMA",
        "HSA_FORCE_FINE_GRAIN_PCIE",
        "KMP_AFFINITY",
        "KMP_BLOCKTIME",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MALLOC_CONF",
        "MKL_NUM_THREADS",
        "NVIDIA_TF32_OVERRIDE",
        "OMP_NUM_THREADS",
        "OMP_PLACES",
        "OMP_PROC_BIND",
        "PYTHONGIL",
        "PYTHONHASHSEED",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_HIP_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "RANK",
        "ROCR_VISIBLE_DEVICES",
        "ROLE_RANK",
        "SLURM_CPUS_PER_TASK",
        "SLURM_GPUS_ON_NODE",
        "SLURM_JOB_ID",
        "SLURM_JOB_NUM_NODES",
        "SLURM_LOCALID",
        "SLURM_NNODES",
        "SLURM_NODEID",
        "SLURM_NTASKS",
        "SLURM_PROCID",
        "SLURM_STEP_ID",
        "TEARDOWN_CUPTI",
        "TF32_OVERRIDE",
        "TOKENIZERS_PARALLELISM",
        "TORCHDYNAMO_DISABLE",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TORCH_CPP_LOG_LEVEL",
        "TORCH_CUDNN_V8_API_DISABLED",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_LOGS",
        "TORCH_SHOW_CPP_STACKTRACES",
        "WORLD_SIZE",
    }
)
"""Names that are kept."""

PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_FR_", "FSDP_", "ACCELERATE_", "DS_", "FI_", "UCX_")
"""Names that are kept whatever follows."""

WITHHELD = "(withheld)"
"""Stands for a value that may be a key, a token or a password."""


def kept_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter for speed, in order of their names; never the whole environment.

    A value that looks like a key or token stands as :data:`WITHHELD`; a variable whose name suggests one
    is left out.
    """
    kept = {}
    for name in sorted(environment):
        if (name in NAMES or name.startswith(PREFIXES)) and not names_secret(name):
            value = environment[name]
            kept[name] = WITHHELD if looks_secret(value) else value[:MAX_VALUE_LENGTH]
    return kept
