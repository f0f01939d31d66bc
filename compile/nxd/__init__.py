"""model.pt for NxD Inference (NxDI), which has no support on trn2 from SDK 2.34 on: frozen, by explicit choice only."""
