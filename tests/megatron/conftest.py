"""These tests run in the environment that `run.sh` makes; in one without megatron-core there are none."""

from importlib.util import find_spec


def there(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


collect_ignore_glob = [] if there("megatron.core") else ["test_*.py"]
