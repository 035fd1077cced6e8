"""The kernels beside what they replace, on this machine, in one run.

    python scripts/bench_kernels.py [--json] [--rounds 5] [--head T H V] [--tokens 32768] [--no-aot]

On a CPU: the torch path against naive logits (T=2048, H=256, V=32,768, float32, forward and backward) and against
transformers' eager loop of experts (T=2048, H=256, I=96, E=128, K=8). Times are process CPU seconds on one thread, the
best of interleaved rounds, so a busy machine does not decide; memory is the growth of the resident peak in a process of
its own. The naive side computes the loss alone; ours computes entropies as well.

On a GPU: first its ceilings (an 8.6 GB copy, a bfloat16 product of 8192, each op's bare products), then correctness of
the same data, then median time and peak memory of each op beside torch, Liger and TRL where they can be imported.
GPU results also go to kernels/results/<gpu>.json.

Keys of --json: device, commit, versions, aot_configs and aot_spills (of scripts/kernels_aot.py), and on a CPU
logprob_memory_ratio (the worse of both ops; ours / naive), grpo_time_ratio, logprob_time_ratio (ours / naive),
experts_fwd_ratio, experts_bwd_ratio (eager / ours), with what they were made of; on a GPU ceilings, errors, and for
each op {"ms", "floor_ms", "fraction_of_bare_gemms", "over_torch", "over_liger", "over_trl"}.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rsi_kernels.experts import experts
from rsi_kernels.linear_grpo import linear_grpo, linear_grpo_reference
from rsi_kernels.linear_logprob import linear_logprob
from rsi_kernels.permute import permute
from rsi_kernels.route import route, route_reference

ROOT = Path(__file__).resolve().parent.parent
CPU_HEAD = (2048, 256, 32768)
CPU_EXPERTS = {"tokens": 2048, "hidden": 256, "inner": 96, "num_experts": 128, "k": 8}
CLIP: dict[str, Any] = {"temperature": 1.0, "loss": "clip", "lo": 0.2, "hi": 0.28}
Step = Callable[[], Any]


# ---------------------------------------------------------------------------------------------- what is measured
def head_operands(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_()
    w = (torch.randn(vocabulary, hidden, device=device) / hidden**0.5).to(dtype).requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,), device=device)
    with torch.no_grad():
        logp, _ = linear_logprob(x, w, target, temperature=1.0, impl="torch")
    return {
        "x": x,
        "w": w,
        "target": target,
        "old": logp + 0.1 * torch.randn_like(logp),
        "advantage": torch.randn(tokens, device=device),
        "token_weight": torch.full((tokens,), 1 / tokens, device=device),
    }


def clip_loss(logp: Tensor, o: Mapping[str, Tensor]) -> Tensor:
    ratio = (logp - o["old"]).exp()
    clipped = ratio.clamp(1 - CLIP["lo"], 1 + CLIP["hi"])
    return (-torch.minimum(ratio * o["advantage"], clipped * o["advantage"]) * o["token_weight"]).sum()


def head_steps(o: Mapping[str, Tensor]) -> dict[str, Step]:
    """Loss, forward and backward, three ways; each leaves the gradients of x and w."""

    def naive() -> Tensor:
        logits = (o["x"] @ o["w"].T).float()
        loss = clip_loss(logits.log_softmax(-1).gather(1, o["target"][:, None])[:, 0], o)
        loss.backward()
        return loss.detach()

    def logprob() -> Tensor:
        loss = clip_loss(linear_logprob(o["x"], o["w"], o["target"], temperature=1.0)[0], o)
        loss.backward()
        return loss.detach()

    def grpo() -> Tensor:
        loss, _ = linear_grpo(o["x"], o["w"], o["target"], o["old"], None, o["advantage"], o["token_weight"], **CLIP)
        loss.backward()
        return loss.detach()

    return {"naive": naive, "linear_logprob": logprob, "linear_grpo": grpo}


def expert_module(hidden: int, inner: int, num_experts: int, k: int) -> Any:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config: Any = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=inner, num_experts=num_experts, num_experts_per_tok=k
    )  # pyright: ignore[reportCallIssue]
    config._experts_implementation = "eager"
    module: Any = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=hidden**-0.5)
    return module


# --------------------------------------------------------------------------------------------------------- CPU
def cpu_report(rounds: int, shape: tuple[int, int, int]) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    operands = head_operands(*shape, torch.float32, "cpu")
    steps = head_steps(operands)
    losses = {name: step().item() for name, step in steps.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, f"the sides disagree: {losses}"
    seconds = best_cpu_seconds(steps, rounds, [operands["x"], operands["w"]])
    del operands, steps
    mib = {name: peak_of_a_process(name, shape) for name in seconds}
    torch.set_num_threads(threads)
    return {
        "logprob_memory_ratio": max(mib["linear_logprob"], mib["linear_grpo"]) / mib["naive"],
        "grpo_time_ratio": seconds["linear_grpo"] / seconds["naive"],
        "logprob_time_ratio": seconds["linear_logprob"] / seconds["naive"],
        "head_cpu_s": seconds,
        "head_peak_extra_mib": mib,
        **cpu_experts(rounds),
    }


def cpu_experts(rounds: int) -> dict[str, Any]:
    tokens, k = CPU_EXPERTS["tokens"], CPU_EXPERTS["k"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = expert_module(**{name: size for name, size in CPU_EXPERTS.items() if name != "tokens"})
    x = torch.randn(tokens, CPU_EXPERTS["hidden"]).requires_grad_()
    weights, ids, _, _ = route(torch.randn(tokens, CPU_EXPERTS["num_experts"]), k)
    weights = weights.requires_grad_()
    up = torch.randn(tokens, CPU_EXPERTS["hidden"])

    def ours() -> Tensor:
        return experts(x, module.gate_up_proj, module.down_proj, weights, *permute(ids, CPU_EXPERTS["num_experts"]))

    def of(implementation: str) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            module.config._experts_implementation = implementation
            return module(x, ids.long(), weights)

        return forward

    sides = {"eager": of("eager"), "grouped_mm": of("grouped_mm"), "ours": ours}
    outputs = {name: side().detach() for name, side in sides.items()}
    assert (outputs["ours"] - outputs["eager"]).norm() < 1e-5 * outputs["eager"].norm(), "the sides disagree"
    forward, backward = {}, {}
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.process_time()
            y = side()
            middle = time.process_time()
            torch.autograd.backward(y, up)
            end = time.process_time()
            forward[name] = min(forward.get(name, 1e9), middle - start)
            backward[name] = min(backward.get(name, 1e9), end - middle)
            x.grad = weights.grad = None
            module.zero_grad()
    return {
        "experts_fwd_ratio": forward["eager"] / forward["ours"],
        "experts_bwd_ratio": backward["eager"] / backward["ours"],
        "experts_cpu_s": {"forward": forward, "backward": backward},
    }


def best_cpu_seconds(steps: Mapping[str, Step], rounds: int, leaves: list[Tensor]) -> dict[str, float]:
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, step in steps.items():
            for leaf in leaves:
                leaf.grad = None
            start = time.process_time()
            step()
            best[name] = min(best.get(name, 1e9), time.process_time() - start)
    return best


def peak_of_a_process(name: str, shape: tuple[int, int, int]) -> float:
    command = [sys.executable, __file__, "--peak-of", name, "--head", *map(str, shape)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def peak_extra_mib(name: str, shape: tuple[int, int, int]) -> float:
    """Growth of this process' resident peak over one step, gradients included; a small step has warmed torch up."""
    torch.set_num_threads(1)
    head_steps(head_operands(64, 64, 512, torch.float32, "cpu"))[name]()
    step = head_steps(head_operands(*shape, torch.float32, "cpu"))[name]
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc holds back would hide as much of the step's
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _resident_mib("VmRSS")
    step()
    return _resident_mib("VmHWM") - before


def _resident_mib(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    [kib] = re.findall(rf"{field}:\s+(\d+) kB", status)
    return int(kib) / 1024


# --------------------------------------------------------------------------------------------------------- GPU
def gpu_report(tokens: int) -> dict[str, Any]:
    from triton.testing import do_bench

    def ms(step: Step) -> float:
        return float(do_bench(step, warmup=200, rep=1000, return_mode="median"))  # pyright: ignore[reportArgumentType]

    ceilings = gpu_ceilings(ms)
    report: dict[str, Any] = {"ceilings": ceilings, "errors": gpu_errors()}
    for vocabulary in (151936, 248320):
        report |= gpu_head(ms, ceilings, tokens, vocabulary)
    for num_experts in (128, 256):
        report |= gpu_route(ms, ceilings, tokens, num_experts)
    for num_experts, inner in ((128, 768), (256, 512)):
        report |= gpu_experts(ms, ceilings, tokens, num_experts, inner)
    return report


def gpu_ceilings(ms: Callable[[Step], float]) -> dict[str, float]:
    source = torch.empty(4_300_000_000, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() / ms(functools.partial(target.copy_, source)) / 1e9
    del source, target
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {"copy_tb_s": copied, "bf16_tflop_s": 2 * 8192**3 / ms(lambda: a @ b) / 1e9}


def gpu_errors() -> dict[str, float]:
    """Norm-wise errors of what `auto` runs, against float64, at the real vocabulary; accumulation over two chunks."""
    o = head_operands(512, 2048, 151936, torch.bfloat16, "cuda")
    rows = (o["target"], o["old"], None, o["advantage"], o["token_weight"])
    loss, metrics = linear_grpo(o["x"], o["w"], *rows, **CLIP, chunk=256)
    loss.backward()
    wide = [o[name].detach().double().requires_grad_() for name in ("x", "w")]
    reference, expected = linear_grpo_reference(wide[0], wide[1], *rows, **CLIP)
    reference.backward()
    logits = torch.randn(4096, 128, device="cuda", requires_grad=True)
    weights, ids, _, _ = route(logits, 8)
    expected_weights, expected_ids, _, _ = route_reference(logits, 8)

    def rel(a: Any, b: Any) -> float:
        return ((a.double() - b).norm() / b.norm()).item()

    return {
        "grpo_logp_abs": (metrics[0] - expected[0]).abs().max().item(),
        "grpo_loss_abs": abs(loss.item() - reference.item()),
        "grpo_dx_rel": rel(o["x"].grad, wide[0].grad),
        "grpo_dw_rel": rel(o["w"].grad, wide[1].grad),
        "route_weights_abs": (weights - expected_weights).abs().max().item(),
        "route_wrong_ids": float((ids != expected_ids).sum().item()),
    }


def gpu_head(
    ms: Callable[[Step], float], ceilings: Mapping[str, float], tokens: int, vocabulary: int
) -> dict[str, Any]:
    o = head_operands(tokens, 2048, vocabulary, torch.bfloat16, "cuda")
    steps = head_steps(o)

    def fresh(step: Step) -> Step:
        def run() -> None:
            o["x"].grad = o["w"].grad = None
            step()

        return run

    def score() -> None:
        with torch.no_grad():
            linear_logprob(o["x"], o["w"], o["target"], temperature=1.0)

    gemms = bare_gemms(ms, o["x"].detach(), o["w"].detach())
    anchors = {name: anchor_ms(ms, make, fresh) for name, make in head_anchors(o, steps).items()}
    flop = 2 * tokens * 2048 * vocabulary
    result: dict[str, Any] = {f"anchors V={vocabulary}": anchors}
    cases = {"linear_grpo": (fresh(steps["linear_grpo"]), 3), "linear_logprob": (fresh(steps["linear_logprob"]), 4)}
    for name, (step, products) in (cases | {"linear_logprob scoring": (score, 1)}).items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        extra_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
        took = ms(step)
        bare = sum(gemms[i % 3] for i in range(products)) if products < 4 else sum(gemms) + gemms[0]
        ratios = {
            f"over_{anchor}": value / took if isinstance(value, float) and products > 1 else None
            for anchor, value in anchors.items()
        }
        result[f"{name} T={tokens} V={vocabulary}"] = {
            "ms": took,
            "floor_ms": products * flop / ceilings["bf16_tflop_s"] / 1e9,
            "fraction_of_bare_gemms": bare / took,
            **ratios,
            "peak_extra_gib": extra_gib,
        }
    return result


def bare_gemms(ms: Callable[[Step], float], x: Tensor, w: Tensor, chunk: int = 4096) -> tuple[float, float, float]:
    """ms of the products alone for all of x: logits, gradient of hidden, gradient of the head."""
    parts = len(x) / min(chunk, len(x))
    x = x[:chunk]
    dz = torch.randn(len(x), len(w), device=x.device, dtype=x.dtype)
    return (
        parts * ms(lambda: torch.mm(x, w.t(), out_dtype=torch.float32)),
        parts * ms(lambda: torch.mm(dz, w)),
        parts * ms(lambda: torch.mm(dz.t(), x, out_dtype=torch.float32)),
    )


def head_anchors(o: Mapping[str, Tensor], steps: Mapping[str, Step]) -> dict[str, Callable[[], Step]]:
    """Each returns a step of forward and backward, or raises what importing it raises."""

    def torch_step() -> Step:
        return steps["naive"]

    def liger() -> Step:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

        loss_of = LigerFusedLinearGRPOLoss(
            beta=0.0, use_ref_model=False, epsilon_low=CLIP["lo"], epsilon_high=CLIP["hi"], temperature=1.0
        )

        def step() -> None:
            rows = {name: o[name][:, None] for name in ("target", "old")}  # one token a sequence
            loss, *_ = loss_of(
                o["x"][:, None], o["w"], rows["target"], torch.ones_like(rows["target"]), o["advantage"],
                old_per_token_logps=rows["old"],
            )  # fmt: skip
            loss.backward()

        return step

    def trl() -> Step:
        from trl.trainer import utils  # pyright: ignore[reportMissingImports]

        function = utils.ChunkedLogProbFunction

        def step() -> None:
            logp, *_ = function.apply(o["x"], o["w"], None, o["target"], 1.0, 32768)
            clip_loss(logp, o).backward()

        return step

    return {"torch": torch_step, "liger": liger, "trl": trl}


def anchor_ms(ms: Callable[[Step], float], make: Callable[[], Step], fresh: Callable[[Step], Step]) -> float | str:
    """Milliseconds, or why there are none. An anchor that fails does not end the run."""
    try:
        return ms(fresh(make()))
    except Exception as error:
        torch.cuda.empty_cache()
        return f"not measured: {type(error).__name__}: {str(error)[:200]}"


def gpu_route(
    ms: Callable[[Step], float], ceilings: Mapping[str, float], tokens: int, num_experts: int
) -> dict[str, Any]:
    logits = torch.randn(tokens, num_experts, device="cuda", dtype=torch.bfloat16)

    def eager() -> None:
        weights, ids = logits.float().softmax(-1).topk(8, -1)
        _ = weights / weights.sum(-1, keepdim=True), torch.bincount(ids.reshape(-1), minlength=num_experts)

    took = ms(lambda: route(logits, 8))
    moved = logits.numel() * 2 + tokens * 8 * 8
    return {
        f"route T={tokens} E={num_experts}": {
            "ms": took,
            "floor_ms": moved / ceilings["copy_tb_s"] / 1e9,
            "fraction_of_bare_gemms": None,
            "over_torch": ms(eager) / took,
            "over_liger": None,
            "over_trl": None,
            "triton_ms": ms(lambda: route(logits, 8, impl="triton")),
        }
    }


def gpu_experts(
    ms: Callable[[Step], float], ceilings: Mapping[str, float], tokens: int, num_experts: int, inner: int
) -> dict[str, Any]:
    module = expert_module(2048, inner, num_experts, 8).to("cuda", torch.bfloat16)
    x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    up = torch.randn_like(x)
    weights, ids, _, _ = route(torch.randn(tokens, num_experts, device="cuda"), 8)

    def ours() -> None:
        sorted_ids = permute(ids, num_experts)
        torch.autograd.backward(experts(x, module.gate_up_proj, module.down_proj, weights, *sorted_ids), up)

    def grouped() -> None:
        module.config._experts_implementation = "grouped_mm"
        torch.autograd.backward(module(x, ids.long(), weights), up)

    took = ms(ours)
    return {
        f"experts fwd+bwd T={tokens} E={num_experts}": {
            "ms": took,
            "floor_ms": 3 * 6 * tokens * 8 * 2048 * inner / ceilings["bf16_tflop_s"] / 1e9,
            "fraction_of_bare_gemms": None,
            "over_torch": ms(grouped) / took,
            "over_liger": None,
            "over_trl": None,
        }
    }


# ------------------------------------------------------------------------------------------------------- report
def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("torch", "triton", "transformers", "liger-kernel", "trl"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def aot_counts() -> dict[str, int | None]:
    """Of scripts/kernels_aot.py, which also tells which ones; None without triton."""
    if importlib.util.find_spec("triton") is None:
        return {"aot_configs": None, "aot_spills": None}
    command = [sys.executable, str(ROOT / "scripts" / "kernels_aot.py"), "--json"]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout)
    return {name: report[name] for name in ("aot_configs", "aot_spills")}


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    models = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return models[0] if models else "cpu"


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=5, help="CPU: rounds of which the best counts (default 5)")
    parser.add_argument("--tokens", type=int, default=32768, help="GPU: tokens of a step (default 32768)")
    parser.add_argument("--head", type=int, nargs=3, default=CPU_HEAD, metavar=("T", "H", "V"), help="CPU: its shape")
    parser.add_argument("--no-aot", action="store_true", help="leave out aot_configs and aot_spills (a minute)")
    parser.add_argument("--peak-of", choices=("naive", "linear_logprob", "linear_grpo"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of:
        print(peak_extra_mib(args.peak_of, args.head))
        return
    result: dict[str, Any] = {"device": device_name(), "commit": commit(), "versions": versions()}
    result |= {} if args.no_aot else aot_counts()
    result |= gpu_report(args.tokens) if torch.cuda.is_available() else cpu_report(args.rounds, args.head)
    if torch.cuda.is_available():
        name = re.sub(r"\W+", "_", result["device"]).strip("_").lower()
        results = ROOT / "kernels" / "results"
        results.mkdir(exist_ok=True)
        (results / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:32}", f"{value:.3f}" if isinstance(value, float) else value)


if __name__ == "__main__":
    main()
