"""Loads any Qwen-class causal language model of transformers the way the trainer and the engine need it.

Departures from a plain `from_pretrained`: experts and routers run on `rsi_kernels` (with model.kernels=off, experts as
transformers' grouped matrix products, equal to the eager loop bit for bit in float32), routers compute in float32
whatever the weights are (4.01 and 4.00 tie in bfloat16), the router's auxiliary loss is off in so many words, and a
weight that the checkpoint lacks stops the load instead of being made up.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rsi.trainer import ModelConfig
from rsi_kernels.install import install

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZER = ("tokenizer.json", "vocab.json")


def load_model(config: ModelConfig) -> tuple[Any, Any]:
    """(module, tokenizer), the module in eval mode (no dropout) on the GPU if there is one.

    Raises ValueError, naming the mend, for a directory without config, weights or tokenizer, for a model that is not of
    the Qwen family, and for an attention implementation that is not there.
    """
    model_config = read_config(config)
    from transformers import AutoModelForCausalLM

    module: Any
    module, report = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        config.path,
        config=model_config,
        dtype=getattr(torch, config.dtype),
        output_loading_info=True,
        **build_options(config, model_config),
    )
    if report["missing_keys"]:
        raise ValueError(
            f"the weights in {config.path} lack {len(report['missing_keys'])} tensors of {type(module).__name__}, "
            f"among them {min(report['missing_keys'])}; use a complete checkpoint of that class"
        )
    settle_experts(config, module)
    return module.eval().to("cuda" if torch.cuda.is_available() else "cpu"), load_tokenizer(config, module)


def meta_model(config: ModelConfig) -> Any:
    """The module with parameters that have a shape and no memory, as `load_model` would build it, in float32; buffers
    are real. Raises as `load_model` does, weights aside."""
    model_config = read_config(config)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, **build_options(config, model_config)
        )
    rotary = module.model.rotary_emb  # its frequencies are computed from the config, not stored
    module.model.rotary_emb = type(rotary)(config=module.config)
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if left:
        raise ValueError(
            f"{type(module).__name__} has buffers that only its own loading fills ({', '.join(left)}); use "
            "trainer.backend=local"
        )
    settle_experts(config, module)
    return module.eval()


def read_config(config: ModelConfig) -> Any:
    """transformers' config of the model."""
    _check_path(config.path)
    _check_attention(config.attention)
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its bars would tear a run's live display at every save
    model_config = AutoConfig.from_pretrained(config.path)
    if not model_config.model_type.startswith("qwen"):
        raise ValueError(
            f"model.path={config.path} is a {model_config.model_type} model; rsi speaks Qwen's chat layout, "
            "use a Qwen-class causal language model"
        )
    return model_config


def build_options(config: ModelConfig, model_config: Any) -> dict[str, str]:
    experts = {"experts_implementation": "grouped_mm"} if num_experts(model_config) else {}
    return {"attn_implementation": config.attention, **experts}


def num_experts(model_config: Any) -> int:
    """0 for a dense model, whose config does not have the field."""
    return getattr(model_config, "num_experts", 0) or 0


def settle_experts(config: ModelConfig, module: Any) -> None:
    """No auxiliary loss, float32 routers, experts on our kernels unless they are off; nothing for a dense model."""
    if num_experts(module.config):
        module.config.output_router_logits = False
        module.config.router_aux_loss_coef = 0.0
        module.router_aux_loss_coef = 0.0
        if config.kernels == "off":
            route_in_float32(module)
        else:
            install(module)


def load_tokenizer(config: ModelConfig, module: Any) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.path)
    rows = module.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer in {config.path} has {len(tokenizer)} tokens and the model {rows} embeddings; "
            "they do not belong together, use the tokenizer that the model was trained with"
        )
    return tokenizer


def checkpoint_activations(module: Any) -> None:
    """Recompute each layer in the backward, whenever the module is in train mode. Raises ValueError for a model with
    dropout, which that mode would switch on."""
    if getattr(module.config, "attention_dropout", 0.0):
        raise ValueError(
            f"trainer.checkpoint_activations needs a model without dropout, found attention_dropout="
            f"{module.config.attention_dropout}; set it to 0 in the model's config.json"
        )
    module.gradient_checkpointing_enable({"use_reentrant": False})


def route_in_float32(module: nn.Module) -> None:
    """Give every `*TopKRouter` below `module` a forward in float32. A no-op in value for float32 weights."""
    for router in module.modules():
        if type(router).__name__.endswith("TopKRouter"):
            router.forward = functools.partial(_route, router)


def _route(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden: [..., H]. Returns (logits float32 [T, E], gate weights [T, K] in hidden's dtype, expert ids [T, K])."""
    rows_TH = hidden.reshape(-1, router.hidden_dim)
    logits = F.linear(rows_TH.float(), router.weight.float())
    gates, experts = logits.softmax(-1).topk(router.top_k, -1)
    if getattr(router, "norm_topk_prob", True):  # Qwen3.5's router has no such field and always renormalises
        gates = gates / gates.sum(-1, keepdim=True)
    return logits, gates.to(hidden.dtype), experts


def _check_path(path: str) -> None:
    if not path:
        raise ValueError("model.path is empty; set it to a model directory or a hub name such as Qwen/Qwen3-30B-A3B")
    directory = Path(path)
    if not directory.is_dir():
        if path.count("/") == 1 and path[0] not in "./~" and not directory.parent.is_dir():
            return  # owner/name: transformers fetches it
        raise ValueError(f"model.path={path} is not a directory; give one that holds a model, or a hub name owner/name")
    wanted = {
        "config.json": ("config.json",),
        "weights": WEIGHTS,
        "a tokenizer": TOKENIZER,
    }
    missing = [
        f"{what} ({' or '.join(names)})"
        for what, names in wanted.items()
        if not any((directory / name).is_file() for name in names)
    ]
    if missing:
        raise ValueError(
            f"model directory {path} lacks {', '.join(missing)}; write them there with save_pretrained of the model "
            "and of its tokenizer"
        )


def _check_attention(attention: str) -> None:
    if attention != "flash_attention_2":
        return
    if importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            "model.attention=flash_attention_2 needs flash-attn: pip install 'rsi[gpu]', or set model.attention=sdpa"
        )
    if not torch.cuda.is_available():
        raise ValueError("model.attention=flash_attention_2 needs a GPU and none is visible; set model.attention=sdpa")
