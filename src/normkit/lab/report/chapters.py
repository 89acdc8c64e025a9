"""The story of Batch Normalization, for readers with a first course in machine learning.

What is written here asks and explains; what came out is said by the records alone. The only numbers are those that a
paper reports, in a sentence that names it.
"""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """An experiment in the story: what it asks, and why that mattered."""

    name: str
    question: str
    text: str


class Chapter(NamedTuple):
    """Experiments that belong together, and what leads to them."""

    title: str
    text: str
    parts: tuple[Part, ...]


CHAPTERS = (
    Chapter(
        "The promise",
        "Deep nets used to be slow and touchy: at a small learning rate they crawled, at a large one they blew up, and "
        "layers of sigmoids stopped learning once their inputs had grown large. Ioffe & Szegedy 2015 proposed one "
        "remedy for all of it: standardize every activation over the examples of the batch, to mean zero and variance "
        "one, then let the net scale it by a gamma and shift it by a beta that it learns. The promise was training in "
        "a fraction of the steps, with less care.",
        (
            Part(
                "sigmoid-mlp",
                "Does it train a net that was hard to train?",
                "Where its input is large, a sigmoid is flat, and a flat function passes no gradient on: layers below "
                "it stop learning. The paper's first experiment compares two nets of sigmoid layers, one with Batch "
                "Normalization and one without, and watches both the accuracy and what enters a sigmoid as training "
                "goes on.",
            ),
            Part(
                "inception",
                "Does it carry over to a net of the time?",
                "The paper's main evidence is Inception, a convolutional net, on the photographs of ImageNet. Ioffe & "
                "Szegedy 2015 report that it took 31.0 million steps to an accuracy of 72.2%, and with Batch "
                "Normalization, a higher rate and a lighter recipe 2.1 million. Here a small net of the same build "
                "learns small images at rates raised in the same way, and sigmoids take the place of ReLUs once more.",
            ),
            Part(
                "depth",
                "What does the gain depend on?",
                "Ioffe & Szegedy 2015 counted 14 times fewer steps, in a deep net, when good initial weights were "
                "still new. Every layer multiplies what passes through it, and over many layers such products vanish "
                "or explode: norms keep each layer's output in range, well-chosen weights do so at first, and skip "
                "connections bypass layers. Nets with and without each of these are made deeper and deeper, both at "
                "the rate that suits them, and what counts is how many times fewer steps it takes with Batch "
                "Normalization to the best that the net achieves without it.",
            ),
            Part(
                "learning-rates",
                "Does it forgive a badly chosen rate?",
                "Whether a net learns at all is most often decided by its learning rate and by the size of its initial "
                "weights. The paper argues that Batch Normalization makes both matter less. So nets are trained at "
                "rates, and from weights, that span several powers of ten, and what counts is how wide the range is "
                "that works.",
            ),
            Part(
                "recipe",
                "Which other remedies does it replace?",
                "Nets of the time needed remedies against overfitting and saturation: Dropout, which drops units at "
                "random, local response normalization, which lets neighboring channels compete, and a strong L2 "
                "penalty on weights. The paper leaves them out or weakens them and reports that nothing is lost. Here "
                "they go one by one, and all at once.",
            ),
            Part(
                "ensemble",
                "Do several such nets together do better still?",
                "Nets that err on different images can outvote each other's errors. With an ensemble of nets with "
                "Batch Normalization the paper claimed the best published result on ImageNet of its day; here small "
                "ones vote, each made a little different from the others.",
            ),
        ),
    ),
    Chapter(
        "How it works",
        "The layer takes a few lines of arithmetic, and each line was a decision: to learn a scale and a shift, where "
        "in a net to put the layer, what to use in place of a batch when the trained net meets a single image. The "
        "paper gives a reason for every one of them, and each reason can be put to the test by itself.",
        (
            Part(
                "affine",
                "What are gamma and beta for?",
                "Standardized inputs keep a sigmoid in its nearly linear middle, which would make a deep net little "
                "more than a linear one. Gamma and beta are there to undo that where it helps. They also make a bias "
                "before the layer useless, and the paper warns of what happens to that bias if the mean is subtracted "
                "without a gradient through it.",
            ),
            Part(
                "placement",
                "Before the nonlinearity or after it?",
                "The paper puts the layer before the nonlinearity, because sums of many inputs look more like a bell "
                "curve than what a nonlinearity makes of them, and shares statistics among all positions of a "
                "channel. Others found it as good elsewhere. Both choices are compared with their alternatives.",
            ),
            Part(
                "inference",
                "What does a trained net do without a batch?",
                "In training an output depends on the other examples of the batch; a net in use should give the same "
                "answer whatever comes with the question. The paper freezes the statistics after training. Frameworks "
                "keep moving averages instead, which can be wrong early on, or with a badly chosen momentum.",
            ),
        ),
    ),
    Chapter(
        "Why it works: the first answer, and its critics",
        "Ioffe & Szegedy 2015 had an explanation: as lower layers learn, the inputs of the upper ones keep changing, "
        "and Batch Normalization holds this internal covariate shift in check. Santurkar et al. 2018 measured that "
        "shift, found it no smaller, and proposed a smoother loss instead; others pointed to the size of weights, to "
        "geometry, and to the noise of batches. Each explanation predicts something that can be measured.",
        (
            Part(
                "covariate-shift",
                "Is the internal covariate shift smaller?",
                "If the layers below change, the gradient of a layer changes too, even before its own weights move. "
                "The size of that change is the measure of Santurkar et al. 2018. If the first explanation is right, "
                "it should be smaller with Batch Normalization.",
            ),
            Part(
                "noisy-bn",
                "Does it still help if the distributions are shaken on purpose?",
                "Santurkar et al. 2018 add noise after each Batch Normalization, with a mean and a spread that are "
                "drawn anew at every step. If steady distributions were what makes training fast, that should ruin it.",
            ),
            Part(
                "landscape",
                "Is the loss smoother?",
                "A gradient is a promise about the loss nearby. Along the direction of each step, it is measured how "
                "much the loss varies and how far the gradient changes: where both are steady, larger steps are safe.",
            ),
            Part(
                "lp-norms",
                "Does it have to be the variance?",
                "If smoothness is the reason, then other ways of fixing the scale should do, even those that do "
                "nothing for the shape of a distribution. Santurkar et al. 2018 divide by the average absolute value, "
                "or by the largest one, in place of the standard deviation.",
            ),
            Part(
                "scale-invariance",
                "What becomes of weights whose size does not matter?",
                "A layer whose output is standardized gives the same output when its weights are doubled. Only their "
                "direction counts, and the larger they are, the less a step turns them: their size acts like a "
                "learning rate, and weight decay, which was meant to keep nets simple, steers it. Theory predicts "
                "where this comes to rest.",
            ),
            Part(
                "geometry",
                "What does it do before anything is learnt?",
                "A net of ReLUs is linear in pieces, and units that switch on or off draw the borders between them. "
                "Borders far from all data are of no use. Balestriero & Baraniuk 2022 show that Batch Normalization "
                "moves them to where the data is, with random weights already, and that the noise of batches makes "
                "them jitter.",
            ),
            Part(
                "coupling",
                "Is its noise a remedy against overfitting?",
                "With batch statistics, an example is seen in another light each time, depending on its batch-mates. "
                "The paper takes that for a kind of regularization. It should be stronger with small batches, and "
                "narrow the gap between what a net achieves on its training images and on new ones.",
            ),
        ),
    ),
    Chapter(
        "Where it hurts",
        "Statistics of a batch are estimates, and statistics that were stored belong to the data they were stored "
        "from. So there are two ways to fail: batches too small for a good estimate, and data that has changed since. "
        "Both are met in practice, and both led to new layers.",
        (
            Part(
                "small-batch",
                "What if only a few images fit into memory?",
                "Large images and detectors leave room for few examples at a time. Wu & He 2018 report that the error "
                "of a ResNet on ImageNet rises from 23.6% with 32 images on each device to 34.7% with 2, and stays at "
                "24.1% with group normalization, whose statistics are those of one image. Here both are compared, and "
                "other norms that were proposed for small batches.",
            ),
            Part(
                "shift",
                "What if the images change after training?",
                "A camera gets noisy, the light fades: the stored statistics no longer describe what comes in. They "
                "can be estimated anew on images without labels, and gamma and beta can be moved so that predictions "
                "become more certain. How much of the loss in accuracy does either recover?",
            ),
        ),
    ),
    Chapter(
        "What came after",
        "Batch Normalization became a part of nearly every convolutional net, and the search went on: for more than "
        "standardizing, for other kinds of nets, and for nets that do without norms altogether.",
        (
            Part(
                "whitening",
                "Would more than standardizing be better?",
                "The paper would have liked to whiten: to remove the correlations between activations as well. It "
                "found that too costly, and standardized each by itself. Later methods made whitening affordable, and "
                "the question is whether it is worth its price.",
            ),
            Part(
                "gan",
                "Does it help two nets that train against each other?",
                "In a generative adversarial net one net makes images and another tells them from real ones; such "
                "pairs are notorious for collapsing. Batch Normalization in both was among the rules that first made "
                "them train reliably.",
            ),
            Part(
                "sequence",
                "Why do language models use another norm?",
                "A language model guesses what comes next, and statistics over whole texts would let it peek. So "
                "transformers standardize each position by itself, with layer norm and its relatives, and there is a "
                "choice again: before each block of layers, or after it.",
            ),
            Part(
                "norm-free",
                "Can nets do without any norm?",
                "If it is known what a norm does for a deep net, it should be possible to do that by other means: by "
                "initial weights that let each block begin as nothing, or by weights that are standardized themselves. "
                "If such nets train where a plain one fails, then much of what norms do has been understood.",
            ),
        ),
    ),
)
