"""vLLM as an engine: servers of its own processes, behind the socket that the embedded engine has.

A trial speaks to a small front process of ours, which speaks HTTP to the server on the same machine. So trials need
neither vLLM nor another client; pausing, updates and cancels are in one place, which is why the version of every
token can be told although vLLM 0.24 does not tell it; and a server that ends ends the front, with one line.

`inside.py` and `receiving.py` run in vLLM's processes, the rest in ours. No file here but `receiving.py` imports torch.
"""

from system.engine.vllm.engine import probe, start_vllm_engine
from system.engine.vllm.settings import Settings

__all__ = ["Settings", "probe", "start_vllm_engine"]
