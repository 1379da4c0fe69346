"""`experiment=diagnose`: what may lose answers with long prompts, and arms that tell."""
