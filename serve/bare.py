"""A platform for processes of vLLM without a bundle, such as `vllm bench serve` or `vllm --version`."""

from vllm.platforms.interface import UnspecifiedPlatform


class BarePlatform(UnspecifiedPlatform):
    """vLLM's own has no type of device, without which its command line ends in a traceback."""

    device_type = "cpu"

    @classmethod
    def import_kernels(cls) -> None:
        """None, as no model runs: its package for CPUs ends the process on a processor without AVX-512."""
