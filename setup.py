"""Packaging. `kernels/` and `eval/` keep their short folder names and are imported as `rsi_kernels` and `rsi_eval`.

A regular package called `kernels` would shadow Hugging Face's distribution of that name and break transformers, so
neither folder has an `__init__.py`, and every package is listed here by hand. The ranges say what may be installed;
`scripts/locks/` says what was measured.
"""

from setuptools import setup

TORCH = ["torch>=2.11,<2.15", "transformers>=5.17,<5.21", "tokenizers>=0.23.1,<0.24", "safetensors>=0.8"]
ON_DISK = ["tensorboard>=2.20", "einops>=0.8", "datasets>=5.2,<6"]

setup(
    name="rsi",
    version="0.1.0",
    description="Recursive self-improvement of terminal agents: one model proposes environments and solves them",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[
        "rsi",
        "rsi.admission",
        "rsi.cli",
        "rsi.domains",
        "rsi.engine",
        "rsi.harbor",
        "rsi.propose",
        "rsi.report",
        "rsi.sandbox",
        "rsi.trainer",
        "rsi_eval",
        "rsi_kernels",
    ],
    package_dir={"rsi": "rsi", "rsi_eval": "eval", "rsi_kernels": "kernels"},
    package_data={
        "rsi": ["skills/*.md"],
        "rsi.admission": ["*.c"],
        "rsi.sandbox": ["*.c", "*.sh"],
        "rsi_eval": ["*.jsonl", "*.jsonl.gz", "*.sha256"],
    },
    entry_points={"console_scripts": ["rsi = rsi.cli:main"]},
    install_requires=[
        "numpy>=2",
        "pyyaml>=6",
        "rich>=13",
        "jinja2>=3.1",
        "pytest>=8",
        "tomli-w>=1.1",
        "pathspec>=0.12",
    ],
    extras_require={
        # pytest is a base requirement: verifiers inside the sandbox run on it.
        "cpu": [*TORCH, *ON_DISK],
        "gpu": [*TORCH, *ON_DISK, "accelerate>=1.15,<2", "flash-attn>=2.8,<3"],
        # vLLM pins torch exactly, never the reverse; this pair also stays inside the ranges above.
        "vllm": [*TORCH, "vllm==0.33.0", "torch==2.14.0"],
        "deepspeed": [*TORCH, "deepspeed>=0.19.8,<0.20", "accelerate>=1.15,<2"],
        "docker": ["docker>=7.1,<8"],
        "terminal": ["pyte>=0.8"],
        "harbor": ["harbor>=0.26,<0.27; python_version >= '3.12'"],
        "dev": ["ruff>=0.17", "pyright[nodejs]>=1.1.414"],
    },
)
