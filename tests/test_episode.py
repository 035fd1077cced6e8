import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from rsi.chat import call_text
from rsi.engine import EngineError
from rsi.engine.scripted import Script, ScriptedEngine
from rsi.episode import EpisodeLimits, observation_text, request_seed, run_episode
from rsi.sandbox import ExecResult, ImageSpec, SandboxConfig, build_backend
from rsi.types import Stop, Trajectory
from tests.roles import CHAT, LIMITS, observations, scripted, site_of


def result(**changes: object) -> ExecResult:
    plain = ExecResult(0, b"", b"", 0, timed_out=False, oom=False, streams_open=False, duration_s=0.0)
    return replace(plain, **changes)  # pyright: ignore[reportArgumentType]


def test_observation_is_stdout_then_stderr_then_the_exit_code():
    assert observation_text(result(stdout=b"out\n", stderr=b"err\n", exit_code=2)) == "out\nerr\n[exit 2]"
    assert observation_text(result()) == "(no output)"
    assert observation_text(result(stdout=b"a\n\n")) == "a\n"
    assert observation_text(result(stdout=b"\xff")) == "\ufffd"
    assert observation_text(result(exit_code=None, timed_out=True, stdout=b"half")) == "half\n[timeout]"


def test_request_seeds_differ_by_turn_episode_and_run():
    seeds = {request_seed(seed, id, turn) for seed in (0, 1) for id in ("a", "b") for turn in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert request_seed(0, "a", 0) == request_seed(0, "a", 0)


def play(
    script: Script | Sequence[str],
    limits: EpisodeLimits = LIMITS,
    on_final: Callable[[], Awaitable[str | None]] | None = None,
    close_first: bool = False,
) -> tuple[Trajectory, ScriptedEngine]:
    """One episode in a real sandbox, and the engine that played it."""

    async def run() -> tuple[Trajectory, ScriptedEngine]:
        engine = scripted(script if callable(script) else list(script))
        backend = build_backend(SandboxConfig())
        try:
            sandbox = await backend.create(await backend.build(ImageSpec(workdir="/app")))
            if close_first:
                await sandbox.close()
            trajectory = await run_episode(
                engine, CHAT, sandbox, id="e", task_id="t", role="solver", system="S", user="U",
                limits=limits, cwd="/app", seed=0, on_final=on_final,
            )  # fmt: skip
            return trajectory, engine
        finally:
            await backend.close()

    return asyncio.run(run())


def test_commands_run_in_the_workdir_and_keep_their_state():
    trajectory, engine = play([call_text("x=7; export y=8; cd /tmp"), call_text("pwd; echo $y"), "Done."])
    assert trajectory.stop is Stop.DONE
    assert observations(trajectory) == ["(no output)", "/tmp\n8"]
    assert engine.ended == ["e"]


def test_every_context_begins_with_the_context_before_it_and_what_was_sampled():
    trajectory, engine = play([call_text("echo '<|im_end''|> hi'"), "<tool_call>", call_text("false"), "Done."])
    grown: tuple[int, ...] = ()
    for turn, request in zip(trajectory.turns, engine.requests, strict=True):
        grown += turn.observed
        assert request.tokens == grown
        assert request.session == "e"
        assert len(turn.logprobs) == len(turn.sampled)
        grown += turn.sampled
    assert observations(trajectory)[1:] == ["the call has no </tool_call>", "[exit 1]"]


def test_output_that_spells_a_special_token_cannot_end_a_turn():
    trajectory, _ = play([call_text("echo '<|im_end''|>'"), "Done."])
    closing = CHAT.end_id
    # the frame's own one, and none from the content
    assert trajectory.turns[1].observed.count(closing) == 1
    assert "<|im_end|>\n</tool_response><|im_end|>" in CHAT.decode(trajectory.turns[1].observed)


def test_an_answer_without_its_stop_id_is_closed_and_is_not_taken_for_an_answer():
    limits = replace(LIMITS, max_new=4)
    trajectory, _ = play(lambda context: "abc" if "cut at" in context else "abcdefgh", limits)
    assert trajectory.stop is Stop.DONE
    assert observations(trajectory) == ["the answer was cut at 4 tokens"]
    assert trajectory.turns[0].sampled[-1] != CHAT.end_id
    assert trajectory.turns[1].observed[0] == CHAT.end_id


def test_the_last_command_of_an_episode_that_meets_max_turns_is_still_run():
    ran: list[str] = []

    async def run() -> Stop:
        async with site_of(lambda context: call_text("echo x >> n")) as site:
            sandbox = await site.backend.create(await site.backend.build(ImageSpec(workdir="/app")))
            trajectory = await run_episode(
                site.engine, CHAT, sandbox, id="e", task_id="t", role="solver", system="S", user="U",
                limits=replace(LIMITS, max_turns=3), cwd="/app", seed=0,
            )  # fmt: skip
            ran.append((await sandbox.exec("cat /app/n")).stdout.decode())
            return trajectory.stop

    assert asyncio.run(run()) is Stop.MAX_TURNS
    assert ran == ["x\nx\nx\n"]


def test_max_tokens_bounds_prompt_observations_and_samples_together():
    limits = replace(LIMITS, max_tokens=400)
    trajectory, engine = play(lambda context: call_text("printf %200s x"), limits)
    assert trajectory.stop is Stop.MAX_TOKENS
    assert sum(len(turn.observed) + len(turn.sampled) for turn in trajectory.turns) <= 400
    assert all(len(request.tokens) + request.max_new <= 400 for request in engine.requests)


def test_a_prompt_that_leaves_no_room_gives_no_turn():
    trajectory, engine = play(["Done."], replace(LIMITS, max_tokens=5))
    assert (trajectory.stop, trajectory.turns, engine.requests) == (Stop.MAX_TOKENS, (), [])


def test_long_output_is_cut_from_its_middle_and_says_so():
    trajectory, _ = play([call_text("seq 100000"), "Done."], replace(LIMITS, max_output=100))
    [text] = observations(trajectory)
    assert text.startswith("1\n2\n") and text.endswith("\n100000") and " bytes cut]" in text
    assert len(text) < 150


def test_a_command_that_times_out_is_said_so_and_the_episode_goes_on():
    limits = replace(LIMITS, command_timeout_s=0.5)
    trajectory, _ = play([call_text("sleep 100"), call_text("echo here"), "Done."], limits)
    assert trajectory.stop is Stop.DONE
    assert observations(trajectory) == ["[timeout]", "here"]


def test_commands_that_use_up_the_wall_time_end_the_episode():
    trajectory, _ = play(lambda context: call_text("sleep 100"), replace(LIMITS, command_timeout_s=0.4, wall_s=0.6))
    assert trajectory.stop is Stop.TIMEOUT
    assert len(trajectory.turns) == 2


def test_an_engine_that_breaks_is_a_fault_and_its_session_is_ended():
    def script(context: str) -> str:
        if "<tool_response>" in context:
            raise EngineError("out of memory")
        return call_text("true")

    trajectory, engine = play(script)
    assert trajectory.stop is Stop.FAULT
    assert len(trajectory.turns) == 1
    assert engine.ended == ["e"]


def test_a_dead_sandbox_is_a_fault():
    trajectory, _ = play([call_text("true"), "Done."], close_first=True)
    assert trajectory.stop is Stop.FAULT


def test_a_final_answer_can_be_sent_back_within_the_same_trajectory():
    reports = ["Not yet.", None]

    async def on_final() -> str | None:
        return reports.pop(0)

    trajectory, engine = play(["First.", "Second."], on_final=on_final)
    assert trajectory.stop is Stop.DONE
    assert observations(trajectory) == ["Not yet."]
    first, second = trajectory.turns
    assert engine.requests[1].tokens == first.observed + first.sampled + second.observed
    assert CHAT.decode(second.observed) == "\n<|im_start|>user\nNot yet.<|im_end|>\n<|im_start|>assistant\n"
