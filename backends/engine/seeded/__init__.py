"""Collaborators of the engine with one fault each; `backends.engine.faults` names them."""
