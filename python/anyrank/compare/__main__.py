# SPDX-License-Identifier: Apache-2.0
"""python -m anyrank.compare"""

import sys

from anyrank.compare import main

sys.exit(main())
