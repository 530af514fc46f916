"""A scripted Anthropic-shaped server: it answers each POST with the next reply and remembers what it was asked."""

import json

import pytest
from aiohttp import web


def text(words):
    return {"type": "text", "text": words}


def call(number, name, arguments):
    return {"type": "tool_use", "id": f"toolu_{number:04}", "name": name, "input": arguments}


class Scripted:
    """`replies` are lists of content blocks, or (status, error body)."""

    def __init__(self):
        self.replies = []
        self.requests = []
        self.seen = []
        self.base_url = ""

    async def any(self, request):
        self.seen.append((request.method, request.path_qs, dict(request.headers)))
        if request.method != "POST" or not request.path.endswith("/v1/messages"):
            return web.json_response({"type": "error", "error": {"type": "not_found_error", "message": "no route"}}, status=404)
        body = await request.json()
        self.requests.append(body)
        reply = self.replies.pop(0) if self.replies else [text("done")]
        if isinstance(reply, tuple):
            return web.json_response(reply[1], status=reply[0])
        message = {
            "id": f"msg_{len(self.requests):04}",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": reply,
            "stop_reason": "tool_use" if any(block["type"] == "tool_use" for block in reply) else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 10, "output_tokens": 5},
        }
        if not body.get("stream"):
            return web.json_response(message)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events(message):
            await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        await response.write_eof()
        return response


def events(message):
    yield {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            yield {"type": "content_block_start", "index": index, "content_block": {"type": "text", "text": ""}}
            for letter in block["text"]:
                yield {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": letter}}
        else:
            yield {"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}}
            part = json.dumps(block["input"])
            yield {"type": "content_block_delta", "index": index, "delta": {"type": "input_json_delta", "partial_json": part}}
        yield {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 5}}
    yield {"type": "message_stop"}


@pytest.fixture
async def scripted():
    server = Scripted()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{tail:.*}", server.any)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    server.base_url = f"http://127.0.0.1:{port}/s/KEY"
    server.text, server.call = text, call
    yield server
    await runner.cleanup()
