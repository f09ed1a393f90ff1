"""Streams through SGLang's own detokenizer, in steps of several tokens: together they are the text without a stream."""

import random
from types import SimpleNamespace

import pytest
from letter_tokenizers import KINDS, letter_tokenizer, mixed_text
from sglang.srt.managers import detokenizer_manager
from sglang.srt.managers.detokenizer_manager import DetokenizerManager, LimitedCapacityDict

from sglang_dspark.features.streams import StreamCutter, whole_letters

DECODE = DetokenizerManager._decode_batch_token_id_output
TOKENIZERS = {kind: letter_tokenizer(kind) for kind in KINDS}


def kept(manager, output):
    """Decode with our hook."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detokenizer_manager, "find_printable_text", whole_letters)
        return DECODE(manager, output)


def manager_of(tokenizer):
    """SGLang's object without its sockets."""
    manager = object.__new__(DetokenizerManager)
    manager.tokenizer, manager.vocab_size = tokenizer, len(tokenizer)
    manager.decode_status = LimitedCapacityDict(capacity=1000)
    manager.disable_tokenizer_batch_decode = manager.is_tool_call_parser_gpt_oss = False
    manager.tool_close_token_ids = frozenset()
    return manager


def pieces(decode, manager, prompt, ids, ends, reason):
    """The texts of the messages that end at these tokens."""
    begin, found = 0, []
    for end in ends:
        message = SimpleNamespace(
            rids=["r"],
            decoded_texts=[""],
            decode_ids=[ids[begin:end] if begin else prompt + ids[:end]],
            read_offsets=[len(prompt)],
            finished_reasons=[reason if end == len(ids) else None],
            no_stop_trim=[False],
            skip_special_tokens=[True],
            spaces_between_special_tokens=[True],
        )
        found += decode(manager, message)
        begin = end
    return found


def streams(kind, number, most, seed=0):
    """Random answers, and where their messages end, in steps of up to so many tokens, behind five of a prompt.

    Some end within a letter, or at a stop string of ideographs; with bytes for what a tokenizer does not know, a letter
    that is never complete changes what is before it, with and without speculation.
    """
    rng, tokenizer = random.Random(seed), TOKENIZERS[kind]
    for _ in range(number):
        prompt, ids = (tokenizer(mixed_text(rng), add_special_tokens=False)["input_ids"] for _ in range(2))
        reason = {"type": "length"}
        if kind in ("bytes", "pieces") and rng.random() < 0.3:
            ids = ids[: rng.randint(1, len(ids))]
        elif rng.random() < 0.2:
            ids += tokenizer("終了", add_special_tokens=False)["input_ids"]
            reason = {"type": "stop", "matched": "終了"}
        ends = [1]
        while ends[-1] < len(ids):
            # SGLang's scheduler keeps back what a stop string may begin with.
            end = min(len(ids), ends[-1] + rng.randint(1, most))
            stops = reason["type"] == "stop" and end > len(ids) - 10
            ends.append(len(ids) if stops else end)
        yield prompt[-5:], ids, ends, reason


def differing(decode, kind, number, most):
    """Counts the streams that are not the text of the answer without a stream."""
    manager = manager_of(TOKENIZERS[kind])
    return sum(
        "".join(pieces(decode, manager, prompt, ids, ends, reason))
        != "".join(pieces(DECODE, manager, prompt, ids, [len(ids)], reason))
        for prompt, ids, ends, reason in streams(kind, number, most)
    )


@pytest.mark.parametrize("number", [150, pytest.param(2500, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_the_text(kind, number):
    for most in (1, 4, 16):
        assert differing(kept, kind, number // 3, most) == 0


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_sglang_repeats_letters_in_steps_of_several_tokens(kind):
    """Why the detokenizer is patched at all."""
    assert differing(DECODE, kind, 150, 1) == 0
    assert differing(DECODE, kind, 150, 8) > 5


def test_what_precedes_a_cut_letter_is_shown_at_once():
    """SGLang would wait for a message that ends between two letters."""
    ids = TOKENIZERS["bytes"]("🎉😀한글", add_special_tokens=False)["input_ids"]
    ends = [1, 6, 10, 13, len(ids)]
    assert [
        pieces(decode, manager_of(TOKENIZERS["bytes"]), [], ids, ends, {"type": "length"}) for decode in (DECODE, kept)
    ] == [["", "", "", "", "🎉😀한글"], ["", "🎉", "😀", "한", "글"]]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("every_token", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_messages_that_are_cut_are_the_same_text(kind, every_token, incremental):
    """And each is cut between letters. Of tokens that are bytes, none has two letters that are complete."""
    tokenizer = TOKENIZERS[kind]
    manager = manager_of(tokenizer)
    for prompt, ids, ends, reason in streams(kind, 60, 8):
        shown, begin, found = "", 0, []
        cutter = StreamCutter(tokenizer, {}, incremental=incremental)
        texts = pieces(kept, manager, prompt, ids, ends, reason)
        for text, end in zip(texts, ends, strict=True):
            shown += text
            answer = {
                "text": text if incremental else shown,
                "output_ids": ids[begin if incremental else 0 : end],
                "meta_info": {"finish_reason": reason if end == len(ids) else None, "completion_tokens": end},
            }
            found += cutter.cut(answer, every_token=every_token)
            begin = end
        whole = "".join(texts)
        new = [message["text"] for message in found]
        if not incremental:
            new = [text.removeprefix(before) for before, text in zip(["", *new], new, strict=False)]
        if kind == "bytes":
            assert all(len(text.rstrip("\ufffd")) <= 1 for text in (new if every_token else new[-1:]))
        if incremental:
            assert "".join(message["text"] for message in found) == whole
            assert [id_ for message in found for id_ in message["output_ids"]] == ids
        else:
            assert all(whole.startswith(message["text"]) for message in found)
            assert (found[-1]["text"], found[-1]["output_ids"]) == (whole, ids)
