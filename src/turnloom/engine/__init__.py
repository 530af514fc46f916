"""Engines: what samples tokens. `contract` is what each promises; `open` makes one from a URL.

`sglang`, `vllm` and `llama_server` are clients. Each has a decoder of its streams
(`sglang_stream`, `vllm_stream`, `llama_completion`) and says how a request is
stopped (`sglang_stop`, `vllm_stop`, `llama_slots`); `http` and `call` are what
they share. `local` starts `embedded`, a small server over `llamacpp` in SGLang's
contract. `pool` makes one engine of several: `seam` joins what they sample, `gate`
holds them. `probe` asks an engine what it does.
"""
