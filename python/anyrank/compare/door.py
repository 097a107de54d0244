# SPDX-License-Identifier: Apache-2.0
"""The command's entry: `anyrank compare` runs this file with the user's python3, which need not have this package
installed. The package is the one that this file is in."""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from anyrank.compare import main  # noqa: E402

sys.exit(main())
