"""A run of `ciuic compress`, from its options to a published artifact.

Reading order: options, pipeline (the steps in order), output_checks, task (the inputs), run (the phases), steps,
journal, encoding, writing; in_place compresses a loaded model.
"""
