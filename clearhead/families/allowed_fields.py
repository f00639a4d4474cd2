"""Which fields of another library's config.json are accepted: an allow-list.

A field is accepted if the family reads it or lists it as harmless (its `FIELDS`), if it never changes what a model computes
(`HARMLESS`), or if it has a value that means "not used" (`NEUTRAL`, and the values that the family names). A field that is null is
not set. Every other field is refused by name. The lists were written from the defaults of transformers' config classes and from
published files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from clearhead.errors import CheckpointError, did_you_mean


def fields(*lines: str) -> frozenset[str]:
    """The names in these lines."""
    return frozenset(name for line in lines for name in line.split())


# How texts are written. checkpoint/loading.py reads some of these fields, and warns of those that are not applied.
GENERATION = fields(
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id",
    "forced_decoder_ids max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups",
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate",
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens renormalize_logits",
    "sequence_bias guidance_scale",
)

# Names, versions, training, storage, forms of the output: no value of these changes what a model computes.
HARMLESS = fields(
    "model_type architectures transformers_version _name_or_path name_or_path tokenizer_class dtype torch_dtype",
    "finetuning_task task_specific_params prefix license tags _commit_hash adapters sentence_transformers unsloth_version",
    "unsloth_fixed transformers.js_config sbert_ce_default_activation_function",
    "output_hidden_states output_attentions output_past return_dict use_return_dict use_cache torchscript use_bfloat16",
    "tf_legacy_loss gradient_checkpointing chunk_size_feed_forward _attn_implementation attn_implementation",
    "_attn_implementation_autoset _flash_attn_2_enabled",
    "id2label label2id num_labels _num_labels problem_type tie_word_embeddings",
    "initializer_range initializer_factor init_std classifier_dropout classif_dropout",
)

# Fields that change what a model computes, with the values that mean "not used".
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "quantization_config": (),
    "partial_rotary_factor": (1.0,),
    "attention_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "embedding_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "attention_sinks": (False,),
    "normalize_before": (False,),
    "normalize_embedding": (False,),
    "add_bias_logits": (False,),
    "static_position_embeddings": (True,),
    "pruned_heads": ({},),
}


def refuse(theirs: Mapping[str, Any], known: Collection[str], **neutral: tuple[Any, ...]) -> None:
    """Raise an error for the first field that is neither in `known`, nor harmless, nor neutral."""
    if theirs.get("modules") and "modules" not in known:
        listed = [module.get("type") for module in theirs["modules"]]
        raise CheckpointError(
            f"modules.json lists {listed}: sentence embeddings of model_type={theirs.get('model_type')!r} are not supported; "
            f"take a BERT or a T5 encoder, or delete modules.json to load the model alone"
        )
    values = {**{field: (None, *accepted) for field, accepted in NEUTRAL.items()}, **neutral}
    accepted = {*known, *HARMLESS, *GENERATION}
    for field, value in theirs.items():
        if field in values and value not in values[field] and field not in known:
            raise CheckpointError(
                f"config.json's {field}={value!r:.80} changes what the model computes and is not supported; "
                f"supported: {', '.join(map(repr, values[field]))}"
            )
        if field not in values and field not in accepted and value is not None:
            near = did_you_mean(field, known)
            raise CheckpointError(
                f"config.json's {field}={value!r:.80} is neither supported nor known to be harmless, so the model might compute "
                f"something else; {f'{near} Else' if near.startswith('did') else 'if it changes nothing,'} delete the field"
            )
