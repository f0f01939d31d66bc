"""From a spec to a bundle: plan, trace to HLO, weights, manifest, doctor."""
