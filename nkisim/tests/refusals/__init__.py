"""Refusals one by one: a call that breaks one rule, and the same call without the mistake."""

from refusals import launch as launch
from refusals import memory as memory
from refusals import ranks as ranks
from refusals import tensor_dma as tensor_dma
from refusals import traced as traced
from refusals import trn3 as trn3
from refusals import vector as vector
from refusals import views as views
