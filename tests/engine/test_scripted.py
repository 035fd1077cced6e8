"""The scripted engine speaks the same Protocol as the real ones."""

from __future__ import annotations

import asyncio

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rsi.engine import Completion, EngineError, Request
from rsi.engine.scripted import LOGPROB, ScriptedEngine, replay


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and <|im_end|>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")


def ask(engine: ScriptedEngine, tokenizer: PreTrainedTokenizerFast, text: str, max_new: int = 50) -> Completion:
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
    return asyncio.run(engine.generate(Request(tokens, max_new, frozenset({256}), 0, "s")))


def test_texts_come_in_order_with_their_stop_id(tokenizer: PreTrainedTokenizerFast):
    engine = ScriptedEngine(tokenizer, 256, replay(["ls", "done"]))
    first = ask(engine, tokenizer, "go")
    assert tokenizer.decode(list(first.tokens)) == "ls<|im_end|>"
    assert (first.logprobs, first.finish) == ((LOGPROB,) * 3, "stop")
    assert tokenizer.decode(list(ask(engine, tokenizer, "go").tokens)) == "done<|im_end|>"
    assert engine.num_generated == 8


def test_a_script_answers_what_it_sees(tokenizer: PreTrainedTokenizerFast):
    engine = ScriptedEngine(tokenizer, 256, lambda context: context.upper())
    assert tokenizer.decode(list(ask(engine, tokenizer, "echo").tokens)) == "ECHO<|im_end|>"


def test_max_new_cuts(tokenizer: PreTrainedTokenizerFast):
    completion = ask(ScriptedEngine(tokenizer, 256, replay(["abcdef"])), tokenizer, "go", max_new=3)
    assert (tokenizer.decode(list(completion.tokens)), completion.finish) == ("abc", "length")


def test_the_end_of_the_script_is_our_fault(tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(EngineError, match="the script ended after 0 texts"):
        ask(ScriptedEngine(tokenizer, 256, replay([])), tokenizer, "go")


def test_load_sets_the_version(tokenizer: PreTrainedTokenizerFast):
    engine = ScriptedEngine(tokenizer, 256, replay(["a"]))
    asyncio.run(engine.load(None, 4))
    assert ask(engine, tokenizer, "go").version == 4
