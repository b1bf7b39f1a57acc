"""On the PYTHONPATH of a trainer's ranks: megatron-core on the CPU from their first line on."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.megatron.cuda_on_cpu import install, install_after_import

install()
import megatron.core.models.gpt  # noqa: E402, F401

install_after_import()
