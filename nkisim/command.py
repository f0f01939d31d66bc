"""How nkisim's commands end: a sentence on stderr instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from nkisim.errors import NkiValidationError


def run(main: Callable[[], int | None]) -> None:
    """Run a command: a mistake of the user's ends with one sentence and code 2, Ctrl-C with 130."""
    try:
        raise SystemExit(main())
    except (NkiValidationError, ValueError, SyntaxError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(141) from None
    except OSError as error:
        print(f"error: {error.filename} cannot be used ({error.strerror}); give another path", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
