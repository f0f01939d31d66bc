"""Refusals one by one: a call that breaks one rule, and the same call without the mistake."""

from tests.nkisim.refusals import engines as engines
from tests.nkisim.refusals import launch as launch
from tests.nkisim.refusals import memory as memory
from tests.nkisim.refusals import ranks as ranks
from tests.nkisim.refusals import tensor_dma as tensor_dma
from tests.nkisim.refusals import traced as traced
from tests.nkisim.refusals import vector as vector
from tests.nkisim.refusals import views as views
