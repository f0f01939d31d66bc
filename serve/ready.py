"""The last line of a start: a request to try, as a command."""

from __future__ import annotations

import json
import os
import shlex
from typing import Any


def try_it(args: Any) -> str:
    """The curl command for a server with these arguments of vLLM's."""
    name = (args.served_model_name or [args.model])[0]
    body = {"model": name, "prompt": "Count from 1 to 100: 1, 2, 3,", "max_tokens": 64, "temperature": 0}
    host = args.host if args.host not in (None, "", "0.0.0.0", "::") else "127.0.0.1"
    place = f"http://[{host}]:{args.port}" if ":" in host else f"http://{host}:{args.port}"
    if args.uds:
        place = f"--unix-socket {shlex.quote(args.uds)} http://localhost"
    key = ' -H "authorization: Bearer $KEY"' if args.api_key or os.environ.get("VLLM_API_KEY") else ""
    return f'curl {place}/v1/completions -H "content-type: application/json"{key} -d {shlex.quote(json.dumps(body))}'
