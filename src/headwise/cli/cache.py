"""The verb that shows and clears what headwise keeps for later: cache."""

from __future__ import annotations

import time
from typing import Annotated

from typing_extensions import Doc

from headwise.cli.verbs import verb


@verb("cache", "Converted GGUF models: how many, how large.", example="cache --clear")
def cache_verb(
    clear: Annotated[bool, Doc("Delete them; they are made again at need.")] = False,
) -> None:
    """Show the GGUF models that are kept de-quantised, or delete them."""
    from headwise.cli.show import console, print_tables
    from headwise.models.conversions import (
        BOUND,
        cache_folder,
        clear_conversions,
        conversions,
        last_used,
        size_of,
        source_of,
    )
    from headwise.tables import table

    if clear:
        console().print(f"freed {clear_conversions() / 1e9:.2f} GB in {cache_folder()}")
        return
    rows = [
        (source_of(one), size_of(one) / 1e9, time.strftime("%Y-%m-%d", time.gmtime(last_used(one))))
        for one in conversions()
    ]
    print_tables([table("Converted GGUF models", "file; GB [.2f]; last used", rows)])
    console().print(
        f"in {cache_folder()} (set HEADWISE_CACHE to move it), at most {BOUND / 1e9:.0f} GB"
    )
