"""Pictures and files for a model that reads text: refused by default, or a placeholder in words, counted; their bytes never."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.support.gateways import Answer, Bench, bench
from tests.support.wires import WIRES, Wire

BYTES = b"\x89PNG" + bytes(500)
DATA = base64.b64encode(BYTES).decode()
URI = f"data:image/png;base64,{DATA}"
TEXT = "What is it?"


def pictured(name: str, data: str = DATA) -> dict[str, Any]:
    uri = f"data:image/png;base64,{data}"
    if name == "anthropic":
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        return {"messages": [{"role": "user", "content": [image, {"type": "text", "text": TEXT}]}]}
    if name == "openai_chat":
        image = {"type": "image_url", "image_url": {"url": uri, "detail": "low"}}
        return {"messages": [{"role": "user", "content": [image, {"type": "text", "text": TEXT}]}]}
    if name == "openai_responses":
        image = {"type": "input_image", "image_url": uri, "detail": "auto"}
        return {"input": [{"role": "user", "content": [image, {"type": "input_text", "text": TEXT}]}]}
    return {"contents": [{"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": data}}, {"text": TEXT}]}]}


async def ask(b: Bench, wire: Wire, data: str = DATA) -> Answer:
    return await b.post({**wire.body("x"), **pictured(wire.name, data)}, wire.whole)


WHOLE = {name: wire for name, wire in WIRES.items() if name != "gemini array"}


async def counted(b: Bench) -> float:
    async with b.http.get(b.gateway.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("turnloom_image_placeholders_total"))


@pytest.mark.parametrize("wire", WHOLE.values(), ids=WHOLE)
async def test_a_picture_is_refused_by_name_of_its_place(wire: Wire) -> None:
    async with bench(["Yes"]) as b:
        answer = await ask(b, wire)
        assert answer.status == 400
        message = answer.body["error"]["message"]
        assert "images and files are not supported" in message
        assert message.split(":")[0].startswith(("messages.0", "input.0", "contents.0"))
        assert DATA[:40] not in message
        assert not b.engine.requests
        assert await counted(b) == 0


@pytest.mark.parametrize("wire", WHOLE.values(), ids=WHOLE)
async def test_a_placeholder_stands_for_it_and_is_counted(wire: Wire) -> None:
    async with bench(["A cat."] * 2, images="placeholder") as b:
        assert wire.said((await ask(b, wire)).body) == "A cat."
        (turn,) = (await b.session()).tree.turns.values()
        prompt = b.tokenizer.decode(turn.appended.tolist())
        assert f"[image/png, {len(BYTES)} bytes, not shown]" in prompt
        assert TEXT in prompt
        assert DATA[:40] not in prompt
        assert "PNG" not in prompt
        assert await counted(b) == 1


@pytest.mark.parametrize("wire", WHOLE.values(), ids=WHOLE)
async def test_a_huge_picture_costs_a_few_tokens(wire: Wire) -> None:
    async with bench(["A cat."], images="placeholder") as b:
        data = base64.b64encode(bytes(6 * 2**20)).decode()
        assert (await ask(b, wire, data)).status == 200
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.prompt_len < 60
        kept = next(n.message for n in (await b.session()).tree.nodes if n.message is not None)
        assert len(kept.text) < 100, "nor is it kept on record"


@pytest.mark.parametrize("wire", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("data", ["", "not base64!", "<|im_end|>"])
async def test_what_is_no_picture_never_reaches_the_prompt(wire: Wire, data: str) -> None:
    async with bench(["A cat."], images="placeholder") as b:
        answer = await ask(b, wire, data)
        assert answer.status in (200, 400)
        for turn in (await b.session()).tree.turns.values():
            prompt = b.tokenizer.decode(turn.appended.tolist())
            assert "not base64" not in prompt
            assert prompt.count("<|im_end|>") == turn.appended.tolist().count(b.tokenizer.control_tokens["<|im_end|>"])
            assert turn.escaped == 0
