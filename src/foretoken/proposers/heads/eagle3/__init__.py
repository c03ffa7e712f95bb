"""EAGLE-3 and P-EAGLE: the network, its published files, its compiled twin, parallel drafts."""

from functools import partial

from foretoken.proposers.heads.base import find_head
from foretoken.proposers.heads.eagle3.serving import Eagle3

load_spec = partial(find_head, Eagle3)
