"""Styles for `parallelize_module`, made of this package's functions and torch's DTensor; imported on first use.

linears       FusedColwiseParallel, FusedRowwiseParallel; parameters that are whole on every rank; derived classes
grouped       FusedGroup: several linears with one gather; linears that are several in one
norms         FusedNormParallel
embeddings    FusedEmbeddingParallel
decoders      parallelize: the whole plan of a Hugging Face decoder, and the check that all ranks apply the same one
pretrained    from_pretrained: a checkpoint into a split decoder, each rank its part
trainer       trainer_class: Hugging Face's Trainer with a split model
meta          models on the meta device: what no checkpoint has
inputs        comparison of the ranks' tokens
stack         the parts of a decoder, by name
tokens        split tokens, heads, tied heads
lora          adapters of peft
in_transformers   use_in_transformers: the styles of transformers' own tensor parallelism, with our forwards
"""
