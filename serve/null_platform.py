"""The platform of vLLM commands without a bundle, such as `vllm bench serve` or `vllm --version`."""

from vllm.platforms.interface import UnspecifiedPlatform


class NullPlatform(UnspecifiedPlatform):
    """vLLM's UnspecifiedPlatform has no device type, without which its command line ends in a traceback."""

    device_type = "cpu"

    @classmethod
    def import_kernels(cls) -> None:
        """Import none: no model runs, and the kernels of vLLM's CPU package need AVX-512."""
