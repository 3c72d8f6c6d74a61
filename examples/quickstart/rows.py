"""The quick start's data: question and answer rows that this project wrote, for a model to learn by heart.

Every question is asked once, so that each has one right answer, and every row is short: a conversation of at
most 60 tokens. The subjects are training language models, this project, and plain facts.
"""

from __future__ import annotations

ABOUT_TRAINING = """
What is a token? | A token is a piece of text, often part of a word, that the model reads as one number.
What is a tokenizer? | A tokenizer cuts text into tokens and joins tokens back into text.
What is a loss? | The loss is a number that says how badly the model guessed the next token.
What does a learning rate do? | The learning rate sets how far the weights move in one update.
What is warm-up? | Warm-up raises the learning rate step by step at the start of a run.
What is a gradient? | A gradient tells each weight which way to move to lower the loss.
What is gradient clipping? | Clipping scales the gradients down when their norm is too large.
What is gradient accumulation? | It adds the gradients of several micro-batches before one update.
What is a micro-batch? | A micro-batch is the part of a batch that one rank handles at a time.
What is a global batch? | The global batch is all samples that one update learns from.
What is an epoch? | An epoch is one pass over all rows of the data.
What is a rank? | A rank is one process of a distributed run.
What is the world size? | The world size is the number of ranks in a run.
What does sharding mean? | Sharding gives each rank only its own slice of the weights.
What is FSDP? | FSDP keeps the weights in slices and gathers a layer only while it is used.
What is HSDP? | HSDP shards inside a group of ranks and keeps a copy in every group.
What is tensor parallelism? | Tensor parallelism splits the matrices of a layer over several ranks.
What is expert parallelism? | Expert parallelism puts different experts on different ranks.
What is context parallelism? | Context parallelism splits one long sequence over several ranks.
What is recomputation? | It throws activations away and computes them again in the backward pass.
What does offload do? | Offload keeps weights in the memory of the host instead of the device.
What is a checkpoint? | A checkpoint holds all that a run needs to go on later.
When is a checkpoint complete? | A checkpoint is complete when its last file is renamed into place.
What does it mean to resume a run? | A resumed run goes on from a checkpoint as if it had never stopped.
What is an optimizer? | The optimizer turns gradients into new weights.
What does AdamW remember? | AdamW keeps two moving averages for every weight.
What is weight decay? | Weight decay pulls the weights a little towards zero at each update.
What is a label mask? | A label mask says which tokens the loss counts.
Which tokens are trained in fine-tuning? | Only the tokens of the reply are trained, none of the question.
What is a chat template? | A chat template says how a conversation is written as one text.
What is an embedding? | An embedding is the vector that stands for a token.
What are tied embeddings? | Tied embeddings use one matrix for both the input and the output.
What is attention? | Attention lets each token look at the tokens before it.
What is a causal mask? | A causal mask hides the future from every token.
What is a mixture of experts? | It is a layer where a router sends each token to a few experts.
What is a router? | The router chooses which experts see a token.
What is packing? | Packing puts several short samples into one sequence.
What is padding? | Padding fills short rows with empty tokens, which is wasted work.
What is pretraining? | Pretraining teaches a model to guess the next token of plain text.
What is fine-tuning? | Fine-tuning teaches a trained model a new task with fewer rows.
What is bf16? | It is a number with 16 bits and the range of fp32.
What is a seed? | A seed fixes what is drawn at random, so that a run can be repeated.
What is a NaN? | A NaN is the result of a calculation that has no answer.
What should a run do at a NaN? | It should stop before the weights are harmed and say where it came from.
What is greedy decoding? | Greedy decoding always takes the most likely next token.
What is overfitting? | A model overfits when it learns its rows by heart and nothing more.
What is a vocabulary? | The vocabulary is the list of all tokens that a model knows.
What is a meta device? | On the meta device tensors have a shape but no memory.
What is a collective? | A collective is an operation that all ranks of a group join.
What is an all-reduce? | An all-reduce sums a tensor over all ranks and gives each the sum.
"""

ABOUT_SHARDYARD = """
What is Shardyard? | Shardyard trains language models from one YAML file.
What does a shard mean in Shardyard? | A shard is the slice of a model that lives on one rank.
How do I start a training run? | Type shardyard train and the name of your YAML file.
How do I check a config without training? | Type shardyard check and the name of your YAML file.
Which wins, the YAML or the command line? | The command line wins over the YAML file.
Which wins, the YAML or the defaults? | The YAML file wins over the defaults.
How many sections does a config have? | Five are usual: model, data, parallel, training and optimization.
Where do I set the learning rate? | Set it under training, with the key lr.
Where do I set the dataset? | Set it under data, with the key dataset.
Where do I set the model folder? | Set it under model, with the key model_name_or_path.
Where do the results go? | They go into the folder named by training.output_dir.
Which file holds the numbers of each step? | They are written to metrics.jsonl in the output folder.
What happens to a misspelt key? | A misspelt key is an error, and the right one is suggested.
Does Shardyard need a GPU? | No. It also runs on a CPU, with the same code.
Which backend joins ranks on a CPU? | Ranks on a CPU talk through gloo.
Which backend joins ranks on NVIDIA GPUs? | NVIDIA GPUs talk through nccl.
Which backend joins ranks on Ascend NPUs? | Ascend NPUs talk through hccl.
How do I resume from the newest checkpoint? | Set training.resume_from_checkpoint to latest.
How do I keep an old output folder? | With overwrite_output_dir the old folder is moved aside, never deleted.
What does Shardyard export? | It exports a model folder that plain transformers can load.
What changes when I add ranks? | Only the speed changes; the numbers stay the same.
Who may use Shardyard? | Anybody may, under the Apache 2.0 licence.
Which entry does torchrun call? | It calls the file train_fsdp2.py at the root.
What is the exit code of a user mistake? | It is two, with one clear message.
Which command runs the tests? | The command make test runs them all.
Which command runs the first example? | The command make train runs it from start to end.
"""

ABOUT_THE_WORLD = """
What is the capital of France? | Paris is the capital of France.
What is the capital of Japan? | Tokyo is the capital of Japan.
What is the capital of Kenya? | Nairobi is the capital of Kenya.
What is the capital of Peru? | Lima is the capital of Peru.
What is the capital of Canada? | Ottawa is the capital of Canada.
What is the capital of China? | Beijing is the capital of China.
What is the capital of Egypt? | Cairo is the capital of Egypt.
What is the capital of Norway? | Oslo is the capital of Norway.
What is the capital of Australia? | Canberra is the capital of Australia.
What is the capital of Portugal? | Lisbon is the capital of Portugal.
Which planet is closest to the Sun? | Mercury is closest to the Sun.
Which planet is the largest? | Jupiter is the largest planet of the Solar System.
Which planet is called the red one? | Mars is called the red planet.
How many moons does the Earth have? | The Earth has one moon.
How long does light take from the Sun to the Earth? | It takes about eight minutes.
At what temperature does water freeze? | Water freezes at zero degrees Celsius.
At what temperature does water boil? | At sea level water boils at one hundred degrees Celsius.
What is water made of? | Water is made of hydrogen and oxygen.
Which gas do plants take in? | Plants take in carbon dioxide.
Which metal is liquid at room temperature? | Mercury is liquid at room temperature.
What is the hardest natural mineral? | Diamond is the hardest natural mineral.
How many legs does a spider have? | A spider has eight legs.
How many legs does an insect have? | An insect has six legs.
Which is the largest animal? | The blue whale is the largest animal.
Which bird cannot fly but swims well? | The penguin cannot fly but swims well.
Which is the tallest mountain above the sea? | Mount Everest is the tallest.
Which is the largest ocean? | The Pacific is the largest ocean.
Which river flows through Cairo? | The Nile flows through Cairo.
How many continents are there? | There are seven continents by the usual count.
How many days does a leap year have? | A leap year has 366 days.
How many minutes are in an hour? | There are sixty minutes in an hour.
How many seconds are in an hour? | There are 3600 seconds in an hour.
How many hours are in a week? | There are 168 hours in a week.
How many sides does a hexagon have? | A hexagon has six sides.
What do the angles of a triangle add up to? | In the plane they add up to 180 degrees.
What is the smallest prime number? | Two is the smallest prime number.
What is seven times eight? | Seven times eight is fifty-six.
What is twelve times twelve? | Twelve times twelve is 144.
What is two to the power of ten? | Two to the power of ten is 1024.
How many bits are in a byte? | There are eight bits in a byte.
Who wrote Hamlet? | William Shakespeare wrote Hamlet.
Which instrument has 88 keys? | A modern piano has 88 keys.
Which colour do blue and yellow paint make? | Blue and yellow paint make green.
In which direction does the Sun rise? | The Sun rises in the east.
"""

TASKS_WITH_INPUT = """
Give the opposite of the word. | hot | The opposite of hot is cold.
Give the opposite of the word. | early | The opposite of early is late.
Give the opposite of the word. | empty | The opposite of empty is full.
Give the plural of the noun. | mouse | The plural of mouse is mice.
Give the plural of the noun. | leaf | The plural of leaf is leaves.
Give the plural of the noun. | child | The plural of child is children.
Give the past tense of the verb. | go | The past tense of go is went.
Give the past tense of the verb. | write | The past tense of write is wrote.
Give the past tense of the verb. | teach | The past tense of teach is taught.
Translate the word into French. | bread | In French bread is called pain.
Translate the word into Spanish. | house | In Spanish house is called casa.
Translate the word into German. | tree | In German tree is called Baum.
"""


def alpaca_rows() -> list[dict[str, str]]:
    """All rows as ``instruction``, ``input`` (empty where there is none) and ``output``."""
    rows: list[dict[str, str]] = []
    for block in (ABOUT_TRAINING, ABOUT_SHARDYARD, ABOUT_THE_WORLD, TASKS_WITH_INPUT):
        for line in block.strip().splitlines():
            parts = [part.strip() for part in line.split("|")]
            rows.append({"instruction": parts[0], "input": "".join(parts[1:-1]), "output": parts[-1]})
    return rows


def question(row: dict[str, str]) -> str:
    """What the user says in an Alpaca row: instruction and input, one below the other."""
    return "\n".join(part for part in (row["instruction"], row["input"]) if part)
