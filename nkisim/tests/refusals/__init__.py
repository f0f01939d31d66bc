"""Refusals one by one: a call that breaks one rule, and the same call without the mistake."""

from nkisim.tests.refusals import launch as launch
from nkisim.tests.refusals import memory as memory
from nkisim.tests.refusals import ranks as ranks
from nkisim.tests.refusals import tensor_dma as tensor_dma
from nkisim.tests.refusals import traced as traced
from nkisim.tests.refusals import trn3 as trn3
from nkisim.tests.refusals import vector as vector
from nkisim.tests.refusals import views as views
