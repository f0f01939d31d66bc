"""The diagrams: the loop of a speculative step, the life of a bundle, and the floor plan of the packages."""

from __future__ import annotations

from itertools import pairwise

from bench.pictures.diagram import DATA, DRAFT, HOST, TARGET, Arrow, Box, Note, Part, svg


def loop() -> str:
    """One step at k = 3: three drafts, four verified rows, what is emitted."""
    columns = [30 + 190 * i for i in range(4)]
    rows = [Box(x, 40, 70, 34, (name,), DATA) for x, name in zip(columns, ("t0", "d1", "d2", "d3"), strict=True)]
    passes = [Box(x + 88, 40, 84, 34, ("draft",), DRAFT) for x in columns[:3]]
    draws = [Box(x, 206, 70, 34, (f"g{i + 1}",), DATA) for i, x in enumerate(columns)]
    asked = ("g1 = d1 ?", "g2 = d2 ?", "g3 = d3 ?", "bonus")
    verdicts = [Box(x - 10, 276, 90, 34, (text,)) for x, text in zip(columns, asked, strict=True)]
    parts: list[Part] = [
        Note(30, 24, "k draft passes; each draws with the noise of its position", heading=True),
        Box(30, 116, 640, 52, ("target: one pass over N = k + 1 rows", "it draws after each row, same noise"), TARGET),
        Box(30, 340, 640, 36, ("emit g1 ... gj, up to and including the first draw that is not its draft",), HOST),
        Note(30, 400, "What is emitted is the target's own draw: a draft changes the time of a step, never a token."),
        *(*rows, *passes, *draws, *verdicts),
    ]
    for row, draw, verdict in zip(rows, draws, verdicts, strict=True):
        middle = row.at(0.5, 1)[0]
        parts += [Arrow(row.at(0.5, 1), (middle, 114)), Arrow((middle, 168), draw.at(0.5, 0))]
        parts.append(Arrow(draw.at(0.5, 1), verdict.at(0.5, 0)))
    for (row, following), run in zip(pairwise(rows), passes, strict=True):
        parts += [Arrow(row.at(1, 0.5), run.at(0, 0.5)), Arrow(run.at(1, 0.5), following.at(0, 0.5))]
    parts += [Arrow(one.at(1, 0.5), following.at(0, 0.5), "yes") for one, following in pairwise(verdicts)]
    return svg(710, 414, parts)


def bundle() -> str:
    """From two checkpoints to a server."""
    spec = Box(20, 40, 150, 66, ("BuildSpec", "the flags of", "compile.build"), HOST)
    plan = Box(220, 40, 170, 66, ("BuildPlan", "graphs, shapes, bytes,", "collectives"))
    hlo = Box(450, 40, 130, 66, ("HLO", "one graph", "a bucket"), DATA)
    neff = Box(640, 40, 150, 66, ("NEFF, model.pt", "where the SDK is"), DATA)
    checkpoints = Box(20, 160, 150, 66, ("checkpoints", "target and draft,", "Hugging Face"), HOST)
    shards = Box(220, 160, 170, 66, ("shards", "one file a rank,", "cut and packed"), DATA)
    held = ("bundle", "manifest.json is written last and holds a digest of every file")
    folder = Box(220, 280, 570, 54, held, TARGET)
    store = Box(20, 280, 150, 54, ("S3 or a folder", "compile.store"))
    here = Box(220, 390, 260, 54, ("any machine", "XLA on the CPU, kernels on nkisim"))
    there = Box(530, 390, 260, 54, ("Trainium2", "a server with the Neuron SDK"))
    parts: list[Part] = [
        *(spec, plan, hlo, neff, checkpoints, shards, folder, store, here, there),
        Note(20, 24, "The life of a bundle", heading=True),
        Arrow(spec.at(1, 0.5), plan.at(0, 0.5)),
        Arrow(plan.at(1, 0.5), hlo.at(0, 0.5)),
        Arrow(hlo.at(1, 0.5), neff.at(0, 0.5)),
        Arrow(checkpoints.at(1, 0.5), shards.at(0, 0.5)),
        Arrow(plan.at(0.5, 1), shards.at(0.5, 0)),
        Arrow(shards.at(0.5, 1), (305, 278)),
        Arrow(hlo.at(0.5, 1), (515, 278)),
        Arrow(neff.at(0.5, 1), (715, 278)),
        Arrow((220, 300), (172, 300)),
        Arrow((170, 316), (218, 316)),
        Arrow((350, 334), (350, 388)),
        Arrow((660, 334), (660, 388)),
    ]
    return svg(810, 460, parts)


def floors() -> str:
    """Who may import whom: an arrow points to what is imported."""
    face = Box(300, 40, 200, 46, ("trnspec", "LLM, Params, build, verify"), HOST)
    deploy = Box(40, 40, 200, 46, ("deploy", "manifests for EKS"))
    bench = Box(560, 40, 200, 46, ("bench", "wall and simulated"))
    compile_ = Box(300, 130, 200, 46, ("compile", "spec, plan, HLO, bundle"), DATA)
    model = Box(300, 220, 200, 46, ("model", "Qwen3, the step, serving"), TARGET)
    kernels = Box(300, 310, 200, 46, ("nki_kernels", "attention, layer, sampling"), DRAFT)
    simulator = Box(560, 310, 200, 46, ("nkisim", "answers to import nki"), DATA)
    demo = Box(40, 310, 200, 46, ("demo", "a pair of small models"))
    parts: list[Part] = [
        *(face, deploy, bench, compile_, model, kernels, simulator, demo),
        Note(40, 24, "An arrow points to what is imported", heading=True),
        Arrow(face.at(0.5, 1), compile_.at(0.5, 0)),
        Arrow(deploy.at(0.5, 1), compile_.at(0, 0.4)),
        Arrow(bench.at(0.3, 1), compile_.at(1, 0.4)),
        Arrow(compile_.at(0.5, 1), model.at(0.5, 0)),
        Arrow(model.at(0.5, 1), kernels.at(0.5, 0)),
        Arrow(kernels.at(1, 0.5), simulator.at(0, 0.5), dashed=True),
        Arrow(bench.at(0.6, 1), simulator.at(0.6, 0)),
        Note(40, 384, "Dashed: only where the vendor's nki is absent. demo and nkisim import nothing of ours."),
    ]
    return svg(800, 402, parts)
