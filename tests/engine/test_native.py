"""The native engine on random tiny models: what it samples is checked against full forwards of the same module."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from rsi.engine import Completion, EngineConfig, EngineError, Request, build_engine
from rsi.engine.forward import Chunk, HfForward, LeanForward, Slots
from rsi.engine.native import NativeEngine, common_prefix, sample

T = TypeVar("T")
CONFIG = EngineConfig(max_batch=6, max_len=96)
NO_STOP: frozenset[int] = frozenset()


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 300, length).tolist())


def run(model: Any, use: Callable[[NativeEngine], Awaitable[T]], config: EngineConfig = CONFIG) -> T:
    async def main() -> T:
        engine = NativeEngine(config, model)
        try:
            return await asyncio.wait_for(use(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(main())


def generate_all(model: Any, requests: list[Request], config: EngineConfig = CONFIG) -> list[Completion]:
    async def use(engine: NativeEngine) -> list[Completion]:
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    return run(model, use, config)


@torch.no_grad()
def rescore(model: Any, request: Request, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the sampled tokens by one forward over the whole sequence."""
    ids = torch.tensor([[*request.tokens, *completion.tokens]])
    logp = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    first = len(request.tokens)
    return logp[first - 1 : -1].gather(-1, ids[0, first:, None])[:, 0]


KINDS = ["Qwen3Moe", "Qwen3", "Qwen2"]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_a_full_forward(make_model: Callable[..., Any], kind: str):
    model = make_model(kind)
    requests = [Request(prompt(i, 3 + 7 * i), 20, NO_STOP, i, f"s{i}") for i in range(6)]
    for request, completion in zip(requests, generate_all(model, requests), strict=True):
        assert len(completion.tokens) == 20
        # float32: cached and full forward sum in another order; 3e-6 measured, a wrong mask or position gives > 1e-2
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), rescore(model, request, completion), atol=1e-4, rtol=0
        )


def test_logprobs_are_tempered(make_model: Callable[..., Any]):
    model = make_model()
    request = Request(prompt(0, 10), 20, NO_STOP, 0, temperature=0.7)
    completion = generate_all(model, [request])[0]
    expected = rescore(model, request, completion, 0.7)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)  # as above
    assert not torch.allclose(torch.tensor(completion.logprobs), rescore(model, request, completion), atol=1e-2)


def test_greedy_takes_the_most_likely_token(make_model: Callable[..., Any]):
    model = make_model()
    request = Request(prompt(1, 12), 15, NO_STOP, 0, temperature=0)
    completion = generate_all(model, [request])[0]
    logits = model(torch.tensor([[*request.tokens, *completion.tokens]])).logits[0]
    assert list(completion.tokens) == logits[11:-1].argmax(-1).tolist()
    torch.testing.assert_close(
        torch.tensor(completion.logprobs), rescore(model, request, completion), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_of_turns_equals_fresh_generation(make_model: Callable[..., Any], kind: str):
    model = make_model(kind)

    async def turns(engine: NativeEngine, session: str) -> list[Completion]:
        tokens, completions = prompt(2, 15), []
        for turn in range(4):
            completion = await engine.generate(Request(tokens, 8, NO_STOP, turn, session))
            completions.append(completion)
            tokens = (*tokens, *completion.tokens, *prompt(turn, 5))
        return completions

    kept, fresh = run(model, lambda engine: turns(engine, "s")), run(model, lambda engine: turns(engine, ""))
    assert [c.tokens for c in kept] == [c.tokens for c in fresh]
    for a, b in zip(kept, fresh, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)  # other shapes, other order of summation


def test_a_session_may_change_its_past(make_model: Callable[..., Any]):
    model = make_model()
    first, second = (
        Request(prompt(3, 30), 8, NO_STOP, 0, "s"),
        Request(prompt(3, 20) + prompt(4, 9), 8, NO_STOP, 1, "s"),
    )

    async def use(engine: NativeEngine) -> Completion:
        await engine.generate(first)
        return await engine.generate(second)

    assert run(model, use).tokens == generate_all(model, [second])[0].tokens


def test_what_else_is_in_the_batch_does_not_matter(make_model: Callable[..., Any]):
    model = make_model()
    request = Request(prompt(5, 20), 25, NO_STOP, 77)
    alone = generate_all(model, [request])[0]
    others = [Request(prompt(100 + i, 5 + 9 * i), 4 + 5 * i, NO_STOP, i) for i in range(7)]
    crowded = generate_all(model, [*others[:3], request, *others[3:]])[3]
    assert crowded.tokens == alone.tokens


def test_attempts_with_one_prompt_share_it_and_differ_by_seed(make_model: Callable[..., Any]):
    model = make_model()
    requests = [Request(prompt(6, 40), 12, NO_STOP, seed, f"s{seed}") for seed in range(6)]
    together = generate_all(model, requests)
    assert len({c.tokens for c in together}) == 6
    assert together[4].tokens == generate_all(model, [requests[4]])[0].tokens


def test_equal_seeds_give_equal_tokens(make_model: Callable[..., Any]):
    request = Request(prompt(7, 10), 12, NO_STOP, 2**63 + 5)
    a, b = generate_all(make_model(), [request, request])
    assert a.tokens == b.tokens


def test_a_stop_id_ends_the_completion_and_is_part_of_it(make_model: Callable[..., Any]):
    model = make_model()
    free = generate_all(model, [Request(prompt(8, 10), 12, NO_STOP, 1)])[0]
    stop = free.tokens[5]
    stopped = generate_all(model, [Request(prompt(8, 10), 12, frozenset({stop}), 1)])[0]
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert (free.finish, stopped.finish) == ("length", "stop")


def test_generation_ends_at_max_len(make_model: Callable[..., Any]):
    completion = generate_all(make_model(), [Request(prompt(9, 90), 50, NO_STOP, 0)])[0]
    assert (len(completion.tokens), completion.finish) == (6, "length")


def test_more_sessions_than_rows_take_turns(make_model: Callable[..., Any]):
    """Ten sessions of two turns over three rows: idle caches are given up and computed again."""
    model = make_model()

    async def episode(engine: NativeEngine, seed: int) -> list[tuple[int, ...]]:
        tokens, said = prompt(seed, 10), []
        for turn in range(2):
            completion = await engine.generate(Request(tokens, 6, NO_STOP, seed + turn, f"e{seed}"))
            said.append(completion.tokens)
            tokens = (*tokens, *completion.tokens, 1, 2, 3)
        return said

    async def use(engine: NativeEngine) -> list[list[tuple[int, ...]]]:
        return await asyncio.gather(*[episode(engine, seed) for seed in range(10)])

    assert run(model, use, EngineConfig(max_batch=3, max_len=96)) == run(
        model, use, EngineConfig(max_batch=10, max_len=96)
    )


def test_an_ended_session_gives_its_row_back(make_model: Callable[..., Any]):
    async def use(engine: NativeEngine) -> None:
        await engine.generate(Request(prompt(0, 10), 3, NO_STOP, 0, "a"))
        engine.end("a")
        engine.end("never seen")
        await engine.generate(Request(prompt(1, 10), 3, NO_STOP, 0, "b"))
        assert [session.name for session in engine._worker._rows if session] == ["b"]

    run(make_model(), use)


def test_num_generated_counts_sampled_tokens(make_model: Callable[..., Any]):
    async def use(engine: NativeEngine) -> int:
        await asyncio.gather(*[engine.generate(Request(prompt(i, 5), 4 + i, NO_STOP, i)) for i in range(3)])
        return engine.num_generated

    assert run(make_model(), use) == 4 + 5 + 6


def test_load_takes_new_weights_and_their_version(make_model: Callable[..., Any]):
    model = make_model()
    request = Request(prompt(0, 20), 10, NO_STOP, 3, "s")

    async def use(engine: NativeEngine) -> tuple[Completion, Completion]:
        before = await engine.generate(request)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        await engine.load(model, 7)
        return before, await engine.generate(request)

    before, after = run(model, use)
    assert (before.version, after.version) == (0, 7)
    torch.testing.assert_close(torch.tensor(after.logprobs), rescore(model, request, after), atol=1e-4, rtol=0)
    assert before.logprobs != after.logprobs


def test_load_copies_a_state_dict_in(make_model: Callable[..., Any]):
    model = make_model()
    other = {name: tensor * 1.2 for name, tensor in make_model().state_dict().items()}
    request = Request(prompt(0, 20), 10, NO_STOP, 3)

    async def use(engine: NativeEngine) -> Completion:
        await engine.load(other, 1)
        return await engine.generate(request)

    completion = run(model, use)
    assert torch.equal(model.state_dict()["model.norm.weight"], other["model.norm.weight"])
    torch.testing.assert_close(
        torch.tensor(completion.logprobs), rescore(model, request, completion), atol=1e-4, rtol=0
    )


def test_weights_that_changed_without_a_load_are_refused(make_model: Callable[..., Any]):
    model = make_model()

    async def use(engine: NativeEngine) -> None:
        await engine.generate(Request(prompt(0, 5), 2, NO_STOP, 0))
        with torch.no_grad():
            model.model.norm.weight.mul_(2)
        with pytest.raises(EngineError, match="call `load`"):
            await engine.generate(Request(prompt(0, 5), 2, NO_STOP, 0))
        await engine.load(model, 1)
        await engine.generate(Request(prompt(0, 5), 2, NO_STOP, 0))

    run(model, use)


def test_broken_weights_fail_every_request_and_good_ones_mend_the_engine(make_model: Callable[..., Any]):
    model = make_model()
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bad = {name: torch.full_like(tensor, float("nan")) for name, tensor in good.items()}
    requests = [Request(prompt(i, 10), 5, NO_STOP, i) for i in range(8)]  # two more than there are rows

    async def use(engine: NativeEngine) -> tuple[list[Any], Completion]:
        await engine.load(bad, 1)
        broken = await asyncio.gather(*[engine.generate(r) for r in requests], return_exceptions=True)
        await engine.load(good, 2)
        return broken, await engine.generate(requests[0])

    broken, mended = run(model, use)
    assert all(isinstance(error, EngineError) and "not finite" in str(error) for error in broken)
    assert mended.tokens == generate_all(make_model(), requests)[0].tokens


def test_a_cancelled_request_leaves_its_row(make_model: Callable[..., Any]):
    async def use(engine: NativeEngine) -> int:
        task = asyncio.ensure_future(engine.generate(Request(prompt(0, 5), 250, NO_STOP, 0)))
        await asyncio.sleep(0)
        task.cancel()
        await engine.generate(Request(prompt(1, 5), 5, NO_STOP, 0))
        return engine.num_generated

    assert 5 <= run(make_model(), use, EngineConfig(max_batch=1, max_len=256)) < 250


def test_close_answers_who_waits_and_refuses_who_comes(make_model: Callable[..., Any]):
    async def main() -> None:
        engine = NativeEngine(EngineConfig(max_batch=1, max_len=256), make_model())
        tasks = [asyncio.ensure_future(engine.generate(Request(prompt(i, 5), 250, NO_STOP, i))) for i in range(3)]
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(answer, EngineError) for answer in answers)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(Request(prompt(0, 5), 2, NO_STOP, 0))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (Request((), 5, NO_STOP, 0), "at least one token"),
        (Request((1,), 0, NO_STOP, 0), "max_new"),
        (Request((1,) * 96, 5, NO_STOP, 0), "raise engine.max_len"),
        (Request((1, 300), 5, NO_STOP, 0), r"\[0, 300\)"),
        (Request((-1,), 5, NO_STOP, 0), r"\[0, 300\)"),
        (Request((1,), 5, NO_STOP, 0, temperature=-1), "greedy"),
    ],
)
def test_requests_out_of_bounds_are_refused(make_model: Callable[..., Any], request_: Request, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        generate_all(make_model(), [request_])


def test_models_it_cannot_serve_are_refused(make_model: Callable[..., Any]):
    with pytest.raises(ValueError, match="positions end at 256"):
        NativeEngine(EngineConfig(max_len=257), make_model())
    sliding = make_model("Qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    with pytest.raises(ValueError, match="full attention"):
        NativeEngine(CONFIG, sliding)


@torch.inference_mode()
def test_the_lean_pass_equals_the_modules_own(make_model: Callable[..., Any]):
    """Mixed chunks over two steps: prompts, continued prompts and single tokens, rows in no order."""
    model = make_model()
    slots = [Slots(model.config, 5, 64, torch.float32, torch.device("cpu")) for _ in range(2)]
    lean, generic = LeanForward(model, slots[0]), HfForward(model, slots[1])
    steps = [
        [Chunk(3, 0, prompt(0, 20)), Chunk(1, 0, prompt(1, 5)), Chunk(0, 0, prompt(2, 1))],
        [Chunk(1, 5, prompt(3, 1)), Chunk(3, 20, prompt(4, 9)), Chunk(0, 1, prompt(5, 1)), Chunk(4, 0, prompt(6, 2))],
    ]
    for chunks in steps:
        torch.testing.assert_close(lean(chunks), generic(chunks), atol=1e-4, rtol=0)  # logits of ~10 in float32
    torch.testing.assert_close(slots[0].keys, slots[1].keys, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_lean_experts_agree_on_both_sides_of_the_switch(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    import rsi.engine.forward as forward

    model = make_model(norm_topk_prob=False)
    lean = LeanForward(model, Slots(model.config, 1, 8, torch.float32, torch.device("cpu")))
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    dense = lean._experts(lean._layers[0], hidden)
    monkeypatch.setattr(forward, "DENSE_EXPERT_TOKENS", 0)
    torch.testing.assert_close(dense, lean._experts(lean._layers[0], hidden), atol=1e-5, rtol=0)


def test_bfloat16_and_many_experts_take_the_modules_own_pass(make_model: Callable[..., Any]):
    assert LeanForward.fits(make_model())
    assert not LeanForward.fits(make_model(dtype=torch.bfloat16))
    assert not LeanForward.fits(make_model(num_experts=32))
    assert not LeanForward.fits(make_model("Qwen3"))
    completion = generate_all(make_model(num_experts=32), [Request(prompt(0, 9), 4, NO_STOP, 0)])[0]
    assert len(completion.tokens) == 4


def test_sampling_inverts_the_cumulative_distribution():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(5, 3)
    tokens, logprobs = sample(logits, [1.0] * 5, [0.0, 0.499, 0.501, 0.799, 0.999])
    assert tokens == [0, 0, 1, 1, 2]
    assert logprobs == pytest.approx(np.log([0.5, 0.5, 0.3, 0.3, 0.2]), abs=1e-6)


def test_a_token_of_probability_zero_is_never_drawn():
    tokens, _ = sample(torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]]).expand(3, 4), [1.0] * 3, [0.0, 0.5, 0.9999])
    assert tokens == [1, 3, 3]


def test_common_prefix_is_exact():
    assert common_prefix([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([5], [1]) == 0
    assert common_prefix([5, 6], [1, 6]) == 0
    assert common_prefix([], [1]) == 0


def test_build_engine_builds_it(make_model: Callable[..., Any]):
    async def main() -> None:
        engine = build_engine(CONFIG, make_model())
        assert isinstance(engine, NativeEngine)
        await engine.close()

    asyncio.run(main())
