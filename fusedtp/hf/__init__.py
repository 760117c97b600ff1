"""Models of Hugging Face on the styles of this package; imported on first use.

decoders      parallelize: the whole plan of a decoder, and the check that all ranks apply the same one
stack         the parts of a decoder, by name
tokens        split tokens, heads, tied heads
lora          adapters of peft
inputs        comparison of the ranks' inputs
meta          models on the meta device: what no checkpoint has
pretrained    from_pretrained: a checkpoint into a split decoder, each rank its part
trainer       trainer_class: Hugging Face's Trainer with a split model
in_transformers   use_in_transformers: the styles of transformers' own tensor parallelism, with our forwards
"""
