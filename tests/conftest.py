"""Two CPU devices for every test process, made before anything traces."""

import jax
import pytest

import model.serving.runtime  # noqa: F401  (sets what XLA reads at its start)

# the plugin also where nkisim is on the path and not installed
pytest_plugins = ["nkisim.pytest_plugin", "pytester"]

jax.config.update("jax_num_cpu_devices", 2)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--witness", action="store_true", help="run nkisim's tests on the vendor's nki too")
