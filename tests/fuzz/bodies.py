"""Valid bodies that use most of what each reader knows: what a fuzzer starts from, and every text that a client can bring."""

from __future__ import annotations

from typing import Any

TURN = "0123456789abcdef0123456789abcdef"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "where", "enum": ["a", "b"]},
        "n": {"type": ["integer", "null"], "minimum": 0},
    },
    "required": ["path"],
    "$defs": {"x": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/x"}]}},
}
B64 = "aGVsbG8="

ANTHROPIC: dict[str, Any] = {
    "model": "claude-x",
    "max_tokens": 64,
    "stream": False,
    "temperature": 1,
    "metadata": {"user_id": "u"},
    "system": [{"type": "text", "text": "x-anthropic-billing-header: v=1\nBe brief.", "cache_control": {"type": "ephemeral"}}],
    "stop_sequences": ["STOP"],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tool_choice": {"type": "auto"},
    "tools": [
        {"name": "read", "description": "Reads a file", "input_schema": SCHEMA},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "mcp_servers": [{"type": "url", "name": "mcp", "url": "http://127.0.0.1:9/mcp"}],
    "messages": [
        {"role": "user", "content": "Look at a."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": f"tl-{TURN}"},
                {"type": "redacted_thinking", "data": TURN},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": f"toolu_{TURN}00", "name": "read", "input": {"path": "a", "n": 3, "deep": {"a": [1, None]}}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": f"toolu_{TURN}00", "is_error": False, "content": [{"type": "text", "text": "1\n2"}]},
                {"type": "tool_reference", "tool_name": "read"},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": "Mind the gap."},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ],
}

OPENAI_CHAT: dict[str, Any] = {
    "model": "gpt-x",
    "stream": False,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 64,
    "max_tokens": 64,
    "n": 1,
    "logprobs": True,
    "stop": ["STOP"],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "tools": [
        {"type": "function", "function": {"name": "read", "description": "Reads a file", "parameters": SCHEMA, "strict": False}},
        {
            "type": "custom",
            "custom": {
                "name": "patch",
                "description": "Patches",
                "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: WORD"}},
            },
        },
        {"type": "web_search"},
    ],
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "name": "ann", "content": "Look at a."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "refusal": None,
            "tool_calls": [
                {"id": f"call_{TURN}00", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}},
                {"id": f"call_{TURN}01", "type": "custom", "custom": {"name": "patch", "input": "*** a"}},
            ],
        },
        {"role": "tool", "tool_call_id": f"call_{TURN}00", "content": "1\n2"},
        {"role": "tool", "tool_call_id": f"call_{TURN}01", "content": [{"type": "text", "text": "done"}]},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ],
}

OPENAI_RESPONSES: dict[str, Any] = {
    "model": "gpt-x",
    "instructions": "Be brief.",
    "stream": False,
    "store": False,
    "max_output_tokens": 64,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "tool_choice": "auto",
    "metadata": {"k": "v"},
    "prompt_cache_key": "p",
    "tools": [
        {"type": "function", "name": "read", "description": "Reads a file", "parameters": SCHEMA, "strict": False},
        {
            "type": "custom",
            "name": "patch",
            "description": "Patches",
            "format": {"type": "grammar", "syntax": "lark", "definition": "s: W"},
        },
        {
            "type": "namespace",
            "name": "mcp",
            "tools": [{"type": "function", "name": "ls", "description": "Lists", "parameters": {"type": "object"}}],
        },
        {"type": "web_search"},
    ],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Mind the gap."}]},
        {"role": "user", "content": "Look at a."},
        {
            "type": "reasoning",
            "id": f"rs_{TURN}00",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
        },
        {"type": "message", "role": "assistant", "id": f"msg_{TURN}01", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "id": f"fc_{TURN}02", "call_id": f"call_{TURN}00", "name": "read", "arguments": '{"path": "a"}'},
        {"type": "custom_tool_call", "id": f"ctc_{TURN}03", "call_id": f"call_{TURN}01", "name": "patch", "input": "*** a"},
        {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "function_call_output", "call_id": f"call_{TURN}00", "output": "1\n2"},
        {"type": "custom_tool_call_output", "call_id": f"call_{TURN}01", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "local_shell_call_output", "id": "c3", "output": "a"},
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "q"}},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "late", "parameters": {"type": "object"}}]},
        {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ],
}

GEMINI: dict[str, Any] = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "generationConfig": {
        "maxOutputTokens": 64,
        "stopSequences": ["STOP"],
        "candidateCount": 1,
        "thinkingConfig": {"includeThoughts": True},
        "responseMimeType": "text/plain",
        "responseModalities": ["TEXT"],
        "responseLogprobs": True,
    },
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["read"]}},
    "tools": [
        {
            "functionDeclarations": [
                {"name": "read", "description": "Reads a file", "parametersJsonSchema": SCHEMA},
                {
                    "name": "ls",
                    "description": "Lists",
                    "parameters": {
                        "type": "OBJECT",
                        "properties": {"p": {"type": "STRING", "nullable": True, "format": "enum", "enum": ["a"]}, "q": {"type": "ARRAY"}},
                        "propertyOrdering": ["q", "p"],
                    },
                },
            ]
        },
        {"googleSearch": {}},
    ],
    "contents": [
        {"role": "user", "parts": [{"text": "Look at a."}]},
        {
            "role": "model",
            "parts": [
                {"text": "Hm.", "thought": True},
                {"text": "I look.", "thoughtSignature": "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="},
                {"functionCall": {"id": "c1", "name": "read", "args": {"path": "a"}}},
            ],
        },
        {
            "role": "user",
            "parts": [{"functionResponse": {"id": "c1", "name": "read", "response": {"output": "1\n2"}}}, {"text": "Go on."}],
        },
        {"role": "user", "parts": [{"text": "And now?"}]},
    ],
}

OPEN: dict[str, Any] = {
    "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 100, "stop": ["x"], "seed": 1},
    "limits": {"max_turns": 5, "max_context": 4000, "turn_timeout": 10.0},
    "labels": {"k": "v"},
    "group": "g",
    "rollout": "r",
    "metadata": {"a": [1, {"b": None}], "__proto__": {"x": 1}},
}
"""Of `POST /api/v1/sessions`."""

DIALECTS = {"anthropic": ANTHROPIC, "openai_chat": OPENAI_CHAT, "openai_responses": OPENAI_RESPONSES, "gemini": GEMINI}
