"""A run of `ciuic compress`: options, the task, its steps, the journal, checks of the output."""
