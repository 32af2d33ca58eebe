"""A run of `ciuic compress`, from its options to a published artifact.

Reading order: options, recipe, time_budget, pipeline (the steps in order), output_checks, task (the inputs), run (the
phases), windows, steps, journal, encoding, writing, loaded_model (the last check); in_place compresses a loaded model.
"""
