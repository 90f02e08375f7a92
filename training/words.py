"""Names, things and verbs beyond those of the shipped problem sets: people type their own.

Training draws from `TRAINED` and, two times in five, spells a name or a thing out of syllables, so
that copying an unknown word is learned and not the list. `HELD_OUT` is never trained on; what is
reported of "unseen" names and things comes from it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


def _several(text: str) -> tuple[str, ...]:
    """Words between commas."""
    return tuple(" ".join(word.split()) for word in text.split(","))


@dataclass(frozen=True)
class Words:
    """What a person and the things that they count may be called."""

    names: tuple[str, ...]
    things: tuple[str, ...]


TRAINED = Words(
    _several(
        """Aaron, Adam, Adele, Aisha, Alan, Albert, Alice, Amir, Amy, Andrea, Andrew, Anita, Anna,
        Anton, Arthur, Astrid, Barbara, Beatrice, Bella, Bernard, Bill, Bob, Boris, Brenda,
        Brian, Bruno, Carla, Carlos, Carmen, Charles, Charlie, Chen, Chloe, Chris, Clara,
        Claire, Colin, Cora, Daisy, Daniel, Daria, David, Deepak, Diego, Dina, Dora, Edgar,
        Elena, Eli, Elif, Ella, Ellen, Elsa, Emil, Emily, Eric, Erin, Esther, Ethan, Fatima,
        Felix, Finn, Fiona, Frank, Frida, Gabriel, Gemma, George, Gina, Grace, Greta, Gus,
        Hanna, Harry, Hassan, Heidi, Helen, Henry, Holly, Ian, Igor, Ines, Ingrid, Iris, Isaac,
        Isabel, Ivan, Jacob, James, Jamal, Jane, Janet, Jason, Jasmine, Jean, Jenny, Jerome,
        Jim, Joan, Joe, John, Jonas, Jorge, Jose, Judy, Julia, Julie, Kai, Karen, Karl, Kate,
        Ken, Kevin, Kim, Kofi, Laila, Lars, Laura, Leila, Lena, Linda, Lisa, Logan, Lola, Louis,
        Lucas, Lucia, Lucy, Luis, Luke, Mara, Marco, Maria, Mark, Martha, Martin, Mary, Matt,
        Maya, Mei, Michael, Mike, Milo, Miriam, Mohamed, Molly, Mona, Nadia, Nancy, Nathan,
        Neil, Nico, Noah, Nora, Oleg, Oliver, Olivia, Oscar, Otto, Pablo, Pam, Patrick, Pedro,
        Peter, Petra, Phil, Priya, Rachel, Raj, Ralph, Ravi, Rita, Robert, Robin, Roger, Ron,
        Rose, Roy, Ruben, Ruth, Ryan, Sally, Sandra, Sanjay, Sara, Sasha, Sean, Simon, Sofia,
        Sonia, Stefan, Stella, Steve, Sue, Susan, Tara, Ted, Theo, Thomas, Tina, Tony, Uma,
        Ursula, Vera, Victor, Vincent, Viola, Walter, Wendy, Wei, Will, Xavier, Yara, Yusuf,
        Zack, Zara"""
    ),
    _several(
        """almonds, antiques, arrows, badges, bags, balloons, balls, bananas, baskets, bells,
        berries, biscuits, blankets, blocks, boats, bones, bottles, bowls, bracelets, bricks,
        brushes, buckets, bulbs, cakes, cameras, cans, caps, carpets, cars, chairs, cherries,
        chickens, chocolates, clips, clocks, comics, cookies, corks, cows, crayons, crystals,
        cups, cupcakes, curtains, daisies, diamonds, dishes, dollars, dolls, donuts, drawings,
        drums, ducks, earrings, envelopes, erasers, feathers, figs, files, fish, flags, flowers,
        folders, forks, games, gems, gloves, goats, goldfish, grapes, hats, hens, hooks, horses,
        jars, jewels, keys, kites, knives, ladders, lamps, leaves, lemons, letters, limes,
        lollipops, magnets, mangoes, maps, masks, medals, melons, mirrors, muffins, mugs,
        mushrooms, nails, napkins, necklaces, needles, newspapers, olives, onions, oranges,
        paintings, pancakes, papers, parcels, peaches, peanuts, pebbles, pictures, pies,
        pillows, pins, pizzas, plants, plates, points, potatoes, postcards, posters, puzzles,
        rabbits, raisins, records, ribbons, rings, robots, rocks, ropes, roses, rulers,
        sandwiches, seeds, shirts, shoes, socks, songs, spoons, squares, sticks, straws,
        strings, sweets, tables, tapes, tents, tickets, tiles, tomatoes, tools, towels, trains,
        trees, trucks, tulips, turtles, vases, videos, walnuts, watches, wheels, whistles,
        windows, wires, toy cars, red balloons, gold coins, baseball cards, glass beads, blue
        pens, old books, candy bars, tennis balls, paper planes, green apples, tea bags"""
    ),
)
HELD_OUT = Words(
    _several(
        """Pia, Ruby, Fred, Olga, Dmitri, Hannah, Aiko, Bart, Celia, Derek, Edith, Farid, Gloria,
        Hector, Ivy, Jill, Kwame, Liam, Mabel, Ned, Opal, Quinn, Rex, Selma, Tariq, Ulla,
        Vivian, Wanda, Yuki, Zelda, Benjamin, Charlotte, Alejandro"""
    ),
    _several(
        """pencils, strawberries, notebooks, candles, oysters, sculptures, kittens, shovels,
        umbrellas, gadgets, dominoes, sheep, carrots, lanterns, thimbles, backpacks, tokens,
        guitars, violins, peppers, chess pieces, rubber ducks, cheese rolls, movie posters,
        bicycles, acorns, pumpkins, jigsaws, telescopes, hamsters"""
    ),
)
GAIN = (
    "buys {k} {t}", "finds {k} more {t}", "gets {k} more {t}", "wins {k} more {t}",
    "receives {k} {t}", "receives {k} more {t}", "collects {k} {t}", "collects {k} more {t}",
    "earns {k} {t}", "picks {k} {t}", "picks up {k} {t}", "gathers {k} {t}", "makes {k} {t}",
    "makes {k} more {t}", "borrows {k} {t}", "takes {k} {t}", "gains {k} {t}", "adds {k} {t}",
    "is given {k} {t}", "orders {k} {t}", "steals {k} {t}", "catches {k} {t}", "grows {k} {t}",
    "inherits {k} {t}", "discovers {k} {t}", "brings home {k} {t}", "gets back {k} {t}",
)  # fmt: skip
LOSE = (
    "eats {k} {t}", "breaks {k} {t}", "uses {k} {t}", "spends {k} {t}", "throws away {k} {t}",
    "donates {k} {t}", "lends {k} {t}", "returns {k} {t}", "burns {k} {t}", "gives {k} {t} away",
    "uses up {k} {t}", "trades away {k} {t}", "hands out {k} {t}", "ruins {k} {t}", "gives {k} {t}",
    "shares {k} {t}", "wastes {k} {t}", "sends away {k} {t}", "pays {k} {t}", "destroys {k} {t}",
    "forgets {k} {t}", "misplaces {k} {t}", "removes {k} {t}", "gives back {k} {t}",
)  # fmt: skip
GAIN_PACKS = (
    "finds {a} bags of {b} {t}", "gets {a} boxes of {b} {t}", "buys {a} boxes with {b} {t} each",
    "wins {a} bags with {b} {t} each", "buys {a} packs of {b} {t}", "receives {a} boxes of {b} {t}",
    "collects {a} bags of {b} {t}",
)  # fmt: skip
LOSE_PACKS = (
    "loses {a} bags of {b} {t}", "sells {a} boxes with {b} {t} each", "drops {a} boxes of {b} {t}",
    "gives away {a} bags of {b} {t}", "donates {a} packs of {b} {t}", "eats {a} bags of {b} {t}",
    "uses {a} boxes of {b} {t}",
)  # fmt: skip
HALF = ("gives away half of the {t}", "eats half of the {t}", "uses half of the {t}")
INTROS = ("{n} has {v} {t}.", "{n} starts with {v} {t}.", "{n} owns {v} {t}.", "{n} had {v} {t}.")
ASKED = (
    "How many {t} does {n} have now?",
    "How many {t} does {n} have?",
    "How many {t} does {n} have left?",
    "How many {t} does {n} have in the end?",
)
_HEADS = _several("b,c,ch,d,f,g,h,j,k,l,m,n,p,r,s,sh,t,v,w,z,br,dr,gr,st,tr")
_VOWELS = _several("a,e,i,o,u,ai,ee,oo")
_TAILS = ("", "", "", "", "n", "r", "l", "s", "m", "t")


def spelled(rng: random.Random, syllables: int) -> str:
    """A word that nobody knows."""
    parts = [
        rng.choice(_HEADS) + rng.choice(_VOWELS) + rng.choice(_TAILS) for _ in range(syllables)
    ]
    return "".join(parts)


def draw_name(rng: random.Random, words: Words) -> str:
    """A name; of the trained words' some are spelled."""
    if words is TRAINED and rng.random() < 0.4:
        return spelled(rng, rng.choice((1, 1, 2, 2, 3))).capitalize()
    return rng.choice(words.names)


def draw_thing(rng: random.Random, words: Words) -> str:
    """Things, in the plural; of the trained words' some are spelled."""
    if words is TRAINED and rng.random() < 0.4:
        return spelled(rng, rng.choice((1, 1, 2, 2, 3))) + "s"
    return rng.choice(words.things)
