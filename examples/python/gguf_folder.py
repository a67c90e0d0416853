"""gguf_folder.py: a GGUF file as a folder that transformers loads in seconds.

    python gguf_folder.py MODEL.gguf          # prints the folder's path

transformers reads GGUF files, but dequantises all weights each time. Here it is done once: float32 weights as safetensors,
configuration and tokenizer, in a folder beside the other downloads, ~/.cache/mdkv/transformers. The tokenizer is a plain one,
because some versions save a GGUF file's under the class of another model. Needs transformers, gguf, accelerate.
"""
import os
import pathlib
import sys

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "mdkv" / "transformers"


def folder_of(gguf):
    """The folder of a GGUF file's model, as a text; made when it is not there, or older than the file. A folder is returned
    as it is. Raises FileNotFoundError if there is no such file."""
    gguf = pathlib.Path(gguf).expanduser()
    if gguf.is_dir():
        return str(gguf)
    if not gguf.is_file():
        raise FileNotFoundError(f"{gguf} is no file; `bash examples/setup.sh` downloads the reference model")
    folder = CACHE / gguf.stem
    done = folder / "done"
    if not done.is_file() or done.stat().st_mtime < gguf.stat().st_mtime:
        import torch
        from tokenizers import processors
        from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        model.hf_quantizer = None  # the weights are plain ones now, and newer versions refuse to save any others
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(folder)
        read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        read.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # no token before the text
        names = {f"{name}_token": read.convert_ids_to_tokens(getattr(model.config, f"{name}_token_id"))
                 for name in ("bos", "eos") if getattr(model.config, f"{name}_token_id", None) is not None}
        PreTrainedTokenizerFast(tokenizer_object=read.backend_tokenizer, chat_template=read.chat_template,
                                pad_token=names.get("eos_token"), **names).save_pretrained(folder)
        done.touch()
    return str(folder)


def load(gguf, **options):
    """Model, ready to generate, and tokenizer of a GGUF file or a folder; `options` are from_pretrained's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = folder_of(gguf)
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval(), AutoTokenizer.from_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(folder_of(sys.argv[1]))
