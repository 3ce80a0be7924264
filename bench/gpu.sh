#!/bin/bash
# Measures a GPU in 15 or 30 minutes: each part under a time limit, one table last.
#
#     bench/gpu.sh 15                     # (GPU) into gpu_runs/DATE
#     bench/gpu.sh 30 FOLDER              # (GPU) more parts: tests, asynchronous rollout, SmolLM2
#     bench/gpu.sh trl                    # (GPU) only flatrl and TRL by turns, 15 minutes
#     bench/gpu.sh 15 FOLDER step_0.5B    # (GPU) some parts alone
#     DRY=1 bench/gpu.sh 30               # prints the commands
#     bench/gpu.sh tiny                   # tries the script, with tiny models, also on a CPU
#
# FOLDER gets PART.log, what a part printed, and record.json and metrics.jsonl as results/gpu has
# them. Models are random. A part that fails (its code), or takes too long (124), is a row.
set -u
cd "$(dirname "$0")/.." || exit
plan=${1:?15, 30, trl or tiny}
out=$(realpath -m "${2:-gpu_runs/$(date +%F_%H%M)}")
only=("${@:3}")
export VLLM_USE_FLASHINFER_SAMPLER=0

part() { # NAME SECONDS COMMAND ...
    local name=$1 limit=$2
    shift 2
    [[ ${#only[@]} -eq 0 || " ${only[*]} " == *" $name "* ]] || return
    if [[ ${DRY:-} ]]; then
        echo "$name $limit $(printf '%q ' "$@")"
        return
    fi
    rm -rf "${out:?}/$name" # of an earlier try
    local began=$SECONDS left=$((minutes * 60 - SECONDS))
    timeout -k 20 $((left < limit ? left < 1 ? 1 : left : limit)) "$@" >"$out/$name.log" 2>&1
    local code=$? figures='^ *[0-9]+/[0-9]+ |^\||^ratio|^flatrl |^TRL|s, 1.00|passed|failed|best of'
    local last=$(grep -aE "$figures" "$out/$name.log" | tail -n 1 | tr '|' ' ' | tr -s ' ')
    echo "| $name | $code | $((SECONDS - began)) | $last |" | tee -a "$out/table.md"
}

recorded() { # the same, of train.py or a bench
    part "$1" "$2" python results/record.py "$out/$1" -- python "${@:3}"
}

step() { # NAME SECONDS SIZE FLAGS ...: steps of 256 rollouts of 512 tokens
    recorded "$1" "$2" train.py --task bench/trl.py --model "$out/models/$3" \
        --output_dir "$out/$1" --max_response_tokens "$tokens" --sampling_args '{"ignore_eos": true}' \
        --eval_every -1 --save_every 0 --lr 1e-6 --allow_mismatch "${few[@]}" "${@:4}"
    [[ ${DRY:-} ]] || rm -rf "$out/$1"/{checkpoints,final} # the disk may be small
}

minutes=15 models=(0.5B 1.5B 7B) sizes=(0.5B 1.5B) tokens=512 few=()
case $plan in
30) minutes=30 ;;
trl) only=(model_0.5B trl) ;;
tiny)
    models=(tiny) sizes=(tiny) tokens=8
    few=(--prompts_per_step 4 --group_size 2 --engine_args '{"kv_cache_memory_bytes": 33554432}')
    ;;
esac
large=${models[-1]} small=$out/models/${models[0]}
if [[ ! ${DRY:-} ]]; then
    mkdir -p "$out/models"
    printf '| part | code | seconds | its last figures |\n| --- | --- | --- | --- |\n' |
        tee -a "$out/table.md"
fi

part host 20 bash -c 'nvidia-smi; lscpu; python -m timeit "sum(range(10**6))"'
for size in "${models[@]}"; do
    part "model_$size" 40 python bench/gpu.py --only --size "$size" --model "$out/models/$size"
done
recorded default 100 train.py --num_steps 12 --output_dir "$out/default"
for size in "${sizes[@]}"; do
    step "step_$size" 130 "$size" --num_steps 6
done
step rollout_lora 120 "$large" --lora_rank 16 --num_steps 2 --rollout_only
replay=(--lora_rank 16 --replay "$out/rollout_lora")
step replay_recomputed 80 "$large" "${replay[@]}" --tokens_per_micro_batch 16384 \
    --gradient_checkpointing true
step replay_8192 80 "$large" "${replay[@]}" --tokens_per_micro_batch 8192 \
    --gradient_checkpointing false
update=(bench/update.py --model "$small" --case 32 64 "$tokens" --rows 256 --only flatrl)
recorded update 75 "${update[@]}"
recorded update_compiled 110 "${update[@]}" --compile
trl=(bench/trl.py --model "$small" --prompts 24 --tokens "$tokens" --rounds 4 --warm_up 1)
trl+=(--no_correction --bf16 --trl)
case $plan in
trl) recorded trl 900 "${trl[@]}" vllm --batch 16 32 48 --turns 2 ;;
tiny) recorded trl 200 "${trl[@]}" ;;
*) recorded trl 220 "${trl[@]}" vllm --batch 48 ;;
esac
if [[ $plan == 30 ]]; then
    part tests 300 python -m pytest tests/gpu -v --junitxml "$out/tests.xml"
    recorded sleep 60 bench/gpu.py --only sleep --cycles 200 --model "$small"
    recorded asynchronous 100 train.py --task results/staleness/slow_calculator.py --num_steps 8 \
        --eval_every 0 --max_staleness 2 --oversample 1.5 --output_dir "$out/asynchronous"
    bisection=(train.py --task examples/bisection.py --agent guess --eval_every 10)
    part smollm2 20 python examples/smollm2.py "$out/models/SmolLM2"
    part games 20 python results/pages.py games "$out/games.jsonl"
    recorded imitation 140 "${bisection[@]}" --algo sft --train_files "$out/games.jsonl" \
        --model "$out/models/SmolLM2" --lr 1e-4 --num_steps 20 --output_dir "$out/imitation"
    recorded bisection 240 "${bisection[@]}" --model "$out/imitation/final" --lr 5e-5 \
        --adv_estimator by_state --whiten_advantages --entropy_coef 0.05 --num_steps 40 \
        --prompts_per_step 4 --group_size 64 --prompts_per_mini_batch 1 --output_dir "$out/bisection"
fi
[[ ${DRY:-} ]] || python results/pages.py steps "$out" | tee -a "$out/table.md"
