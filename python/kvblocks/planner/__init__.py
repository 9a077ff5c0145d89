"""How many users fit on a GPU: from a model's configuration and a card to blocks, users and contexts.

`fields` -> `model` -> `architectures` say what a model caches, `memory` and `weights` what is left for it, `lengths`
how long contexts are, `plan` how many fit, `levers` what would change it; `command` is `kvblocks plan`.
docs/planner.md defines every figure.
"""
