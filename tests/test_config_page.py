"""configs/README.md lists every field as config.py has it. Run as a program, this file writes that page anew."""

from pathlib import Path

from dora_jax.base import helping
from dora_jax.config import Config

PAGE = Path(__file__).parents[1] / "configs" / "README.md"


def test_the_page_lists_every_field_as_it_is():
    assert PAGE.read_text() == helping.page(Config), "write it anew: python tests/test_config_page.py"


if __name__ == "__main__":
    PAGE.write_text(helping.page(Config))
