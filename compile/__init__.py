"""From a spec to a bundle: plan, trace to HLO, weights, manifest, doctor."""

from model.errors import quiet_start

quiet_start()
