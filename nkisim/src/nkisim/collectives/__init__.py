"""nki.collectives over simulated ranks in one process; see nkisim.ranks for launching them."""

# ruff: noqa: F403
from nkisim.collectives.dense import *
from nkisim.collectives.exchange import ReplicaGroup as ReplicaGroup
from nkisim.collectives.exchange import rg_partition_op as rg_partition_op
from nkisim.collectives.rings import *
from nkisim.collectives.variable import *
