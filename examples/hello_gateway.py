"""Open a gateway, let any Anthropic client talk through it, get exact samples back.

pip install 'turnloom[agent,local]' && python examples/hello_gateway.py
"""

import anthropic

from turnloom import Gateway

with Gateway.background(engine="local:smollm2") as gateway:
    session = gateway.open_session()
    client = anthropic.Anthropic(base_url=session.base_url, api_key=session.key)

    messages: list[anthropic.types.MessageParam] = []
    for question in ("Name a colour.", "Name an animal of that colour."):
        messages.append({"role": "user", "content": question})
        reply = client.messages.create(model="any", max_tokens=40, messages=messages)
        messages.append({"role": "assistant", "content": [block.to_dict() for block in reply.content]})  # type: ignore[typeddict-item]
        print("user:     ", question)
        print("assistant:", "".join(block.text for block in reply.content if block.type == "text"))

    for sample in session.finish(reward=1.0):
        trained = int(sample.loss_mask.sum())
        print(f"sample: {len(sample.token_ids)} tokens, {trained} trained, prompt of {sample.prompt_len}, reward {sample.reward}")
