"""A cluster's secret, and its two forms for users: a passphrase, and a join code.

A join code is `covey1-` and then, in Crockford's base32 in groups of five:

    length, length XOR 0x5A     of all that follows, in bytes; twice, so that a typing error differs from a missing end
    name length, name           of the cluster
    key                         32 bytes
    owner                       1, 32 bytes: the owner's public key; nothing, if the cluster has no owner
    seeds                       each 4, four bytes, port; or 6, sixteen bytes, port
    relays                      each 2, length, host, port; at most two
    checksum                    the first 5 bytes of SHA-256 over all of the above except the first two bytes
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import re
import unicodedata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from covey.base.config import parse_relay
from covey.base.errors import ConfigError
from covey.wire.signed import OWNER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CLUSTER_NAME: Final = re.compile(r"[a-z0-9-]{1,40}")
KEY_BYTES: Final = 32
MAX_SEEDS: Final = 7
MAX_RELAYS: Final = 2
HOST_LIMIT: Final = 64
"""Letters of a relay's host in a join code."""
_BODY_LIMIT: Final = 255
_CODE_PREFIX: Final = "covey1"
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_LOOKALIKES: Final = str.maketrans("oil", "011")
_OWNER: Final = 1
_RELAY: Final = 2
_LENGTH_MASK: Final = 0x5A
_CHECKSUM_BYTES: Final = 5
_COMPARE: Final = "compare it with what `covey init --show` prints on the machine that has it"


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """The name of a cluster and its secret, 32 bytes that only its nodes know."""

    name: str
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_cluster_name(self.name)
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise ConfigError(f"the secret of cluster {self.name!r} must be {KEY_BYTES} bytes")

    def derive(self, purpose: str) -> bytes:
        """Return the 32-byte key for one purpose. A key reveals nothing about another, or about the secret."""
        info = f"covey/1/{purpose}/{self.name}".encode()
        return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=b"covey/1", info=info).derive(self.key)


class JoinCode(NamedTuple):
    """The contents of a join code."""

    secret: ClusterSecret
    seeds: tuple[str, ...]
    owner: bytes
    """The owner's public key, or empty."""
    relays: tuple[str, ...] = ()


def check_cluster_name(name: str) -> str:
    """Return `name`; raise ConfigError if it is not a valid name of a cluster."""
    if not CLUSTER_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be a cluster's name: use 1 to 40 of the characters a-z, 0-9 and -")
    return name


def from_passphrase(name: str, passphrase: str, *, random: Callable[[int], bytes]) -> ClusterSecret:
    """Return the secret that a passphrase gives for a cluster. Takes half a second of computation.

    Raises:
        ConfigError: it is easy to guess. The message suggests a good one, made of `random` bytes.
    """
    text = " ".join(unicodedata.normalize("NFKC", passphrase).split())
    if is_weak(text):
        raise ConfigError(
            "this passphrase is too easy to guess: take five or more different words, or twenty or more "
            f"characters that do not repeat; for example: {new_passphrase(random)}"
        )
    # With a recorded announcement or connection, an attacker can try guesses offline, so each must be expensive.
    salt = f"covey/1/passphrase/{check_cluster_name(name)}".encode()
    key = hashlib.scrypt(text.encode(), salt=salt, n=2**17, r=8, p=1, maxmem=2**28, dklen=KEY_BYTES)
    return ClusterSecret(name, key)


def is_weak(passphrase: str) -> bool:
    """Tell whether a passphrase is short, or long only by repetition; a word has three letters and counts once."""
    words = list(dict.fromkeys(passphrase.lower().split()))
    text = " ".join(words)
    jumps = sum(abs(ord(one) - ord(other)) > 1 for one, other in itertools.pairwise(text))  # not aaa, not 123
    return (len(text) < 20 and sum(len(word) > 2 for word in words) < 5) or len(set(text)) < 8 or jumps < 10


def new_passphrase(random: Callable[[int], bytes]) -> str:
    """Return six random words, 54 bits; scrypt makes each guess cost half a second."""
    words, number = _WORDS.split(), int.from_bytes(random(7), "big")
    return " ".join(words[number >> 9 * place & 511] for place in range(6))


def encode_join_code(
    secret: ClusterSecret, seeds: Sequence[str] = (), owner: bytes = b"", relays: Sequence[str] = ()
) -> str:
    """Return a join code for the cluster; `seeds` are `ip:port` or `[ip6]:port`, at most seven.

    `relays` are `host:port`, at most two; if the code would be too long with them, it has fewer seeds.
    """
    if len(relays) > MAX_RELAYS:
        raise ConfigError(f"a join code holds at most {MAX_RELAYS} relays, not {len(relays)}")
    if len(seeds) > MAX_SEEDS:
        raise ConfigError(f"a join code holds at most {MAX_SEEDS} seeds, not {len(seeds)}")
    name = secret.name.encode()
    owned = bytes([_OWNER]) + owner if owner else b""
    first = bytes([len(name)]) + name + secret.key + owned
    packed, last = [_pack_seed(seed) for seed in seeds], b"".join(_pack_relay(relay) for relay in relays)
    while packed and len(first) + sum(map(len, packed)) + len(last) + _CHECKSUM_BYTES > _BODY_LIMIT:
        packed.pop()
    body = first + b"".join(packed) + last
    body += _checksum(body)
    text = _to_base32(bytes([len(body), len(body) ^ _LENGTH_MASK]) + body)
    return "-".join([_CODE_PREFIX, *(text[at : at + 5] for at in range(0, len(text), 5))])


def decode_join_code(text: str) -> JoinCode:
    """Return the contents of a join code; case, spaces, line breaks and dashes do not matter.

    Raises:
        ConfigError: it is mistyped, incomplete, or no join code at all; the message says which.
    """
    if not looks_like_join_code(text):
        raise ConfigError(f"this is not a join code: one begins with `{_CODE_PREFIX}-`, and `covey init` makes it")
    letters = _plain(text)[len(_CODE_PREFIX) :]
    if not set(letters) <= set(_ALPHABET):
        strange = min(set(letters) - set(_ALPHABET))
        raise ConfigError(f"this join code has a typing error: {strange!r} is in none; {_COMPARE}")
    if len(letters) < 4:
        raise ConfigError(f"this join code is incomplete: it ends after its first letters; {_COMPARE}")
    header = _from_base32(letters[:4])
    expected = _letters_for(2 + header[0])
    if header[0] ^ _LENGTH_MASK != header[1] or len(letters) > expected:
        raise ConfigError(f"this join code has a typing error; {_COMPARE}")
    if len(letters) < expected:
        raise ConfigError(f"this join code is incomplete: {expected - len(letters)} letters are missing; {_COMPARE}")
    body = _from_base32(letters)[2:]
    content, checksum = body[:-_CHECKSUM_BYTES], body[-_CHECKSUM_BYTES:]
    # The bits that pad the last letter must be zero, so that each code has one form.
    if _to_base32(header[:2] + body) != letters or _checksum(content) != checksum:
        raise ConfigError(f"this join code has a typing error; {_COMPARE}")
    return _unpack(content)


def looks_like_join_code(text: str) -> bool:
    """Tell whether `text` starts as join codes do."""
    return _plain(text).startswith(_CODE_PREFIX.translate(_LOOKALIKES))


def _plain(text: str) -> str:
    """Return the letters of a join code without the separators, which users and mail programs change."""
    return re.sub(r"[\s\"'`\u00ad\u200b-\u200d\u2010-\u2015\u2212-]", "", text.lower()).translate(_LOOKALIKES)


def _letters_for(size: int) -> int:
    return -(-size * 8 // 5)


def _to_base32(data: bytes) -> str:
    count = _letters_for(len(data))
    number = int.from_bytes(data, "big") << (count * 5 - len(data) * 8)
    return "".join(_ALPHABET[number >> 5 * place & 31] for place in reversed(range(count)))


def _from_base32(letters: str) -> bytes:
    number = 0
    for letter in letters:
        number = number << 5 | _ALPHABET.index(letter)
    size = len(letters) * 5 // 8
    return (number >> (len(letters) * 5 - size * 8)).to_bytes(size, "big")


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECKSUM_BYTES]


def _pack_seed(seed: str) -> bytes:
    host, _, port = seed.rpartition(":")
    try:
        bracketed = host.startswith("[") and host.endswith("]")
        ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
        if (ip.version == 6) != bracketed or "%" in host or not (port.isascii() and port.isdigit()):
            raise ValueError
        return bytes([ip.version]) + ip.packed + _checked_port(int(port)).to_bytes(2, "big")
    except ValueError:
        raise ConfigError(f"{seed!r} cannot be in a join code: write ip:port or [ip6]:port, in numbers") from None


def _pack_relay(relay: str) -> bytes:
    host, port = parse_relay(relay)
    if len(host) > HOST_LIMIT or not host.isascii():
        raise ConfigError(f"{relay!r} cannot be in a join code: its host has more than {HOST_LIMIT} letters, or others")
    return bytes([_RELAY, len(host)]) + host.encode() + port.to_bytes(2, "big")


def _unpack_relay(rest: bytes) -> tuple[str, bytes]:
    """Return the relay at the start of what is left of a code, and what follows it."""
    size = rest[1]
    host, port = rest[2 : 2 + size].decode("ascii"), rest[2 + size : 4 + size]
    if len(port) != 2 or size > HOST_LIMIT:
        raise ValueError
    number = _checked_port(int.from_bytes(port, "big"))
    relay = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
    parse_relay(relay)
    return relay, rest[4 + size :]


def _checked_port(port: int) -> int:
    if not 0 < port < 65536:
        raise ValueError
    return port


def _unpack(content: bytes) -> JoinCode:
    """Parse the contents of a code whose checksum is right; they are invalid only if another program made it."""
    try:
        name, rest = content[1 : 1 + content[0]], content[1 + content[0] :]
        secret, rest = ClusterSecret(name.decode("ascii"), rest[:KEY_BYTES]), rest[KEY_BYTES:]
        owner = b""
        if rest[:1] == bytes([_OWNER]):
            owner, rest = rest[1 : 1 + OWNER_BYTES], rest[1 + OWNER_BYTES :]
            if len(owner) != OWNER_BYTES:
                raise ValueError
        seeds: list[str] = []
        relays: list[str] = []
        while rest and rest[0] != _RELAY:
            size = {4: 4, 6: 16}[rest[0]]
            ip, port = ipaddress.ip_address(rest[1 : 1 + size]), rest[1 + size : 3 + size]
            if len(port) != 2 or len(seeds) == MAX_SEEDS:
                raise ValueError
            number = _checked_port(int.from_bytes(port, "big"))
            seeds.append(f"[{ip}]:{number}" if ip.version == 6 else f"{ip}:{number}")
            rest = rest[3 + size :]
        while rest:
            relay, rest = _unpack_relay(rest if rest[0] == _RELAY and len(relays) < MAX_RELAYS else b"")
            relays.append(relay)
    except (ValueError, LookupError, ConfigError):
        raise ConfigError(
            "this join code was made by another version of covey; update covey on both machines"
        ) from None
    return JoinCode(secret, tuple(seeds), owner, tuple(relays))


_WORDS: Final = """
acorn actor agent album alley almond amber anchor angle ankle anvil apple apron arch arena arrow aspen atlas attic
autumn avocado axle bacon badge badger bagel baker balcony bamboo banana banjo barley barn basil basin basket beach
beacon beaver bell bench berry birch biscuit bison blanket blossom boat bonfire book border bottle boulder bracket
branch brass bread breeze brick bridge broom brush bucket buffalo bugle bundle bus butter button cabin cable cactus
camel camera candle canoe canvas canyon carbon cargo carpet carrot cart castle cattle cedar cellar cello chalk chapel
charcoal cherry chess chestnut chimney cinema circus citrus clay cliff clock cloud clover coast cobalt cobra cocoa
coconut coffee collar comet compass copper coral corner cotton cousin cradle crane crater cricket crown crystal cup
curtain cushion daisy dancer deck deer delta denim desert diamond dinner dock dolphin dome donkey door dragon drawer
drum duck dune eagle easel echo eclipse elbow elm ember engine envelope fabric falcon farmer feather fence fern ferry
fiddle field fig finger flag flame flask flint flower flute forest fork fossil fountain fox frame frost fruit galaxy
garden garlic gate gazelle ginger giraffe glacier glass glove goat gold gorge grain granite grape gravel guitar gull
hammer hammock harbor harp harvest hawk hazel hedge heron hill hive hockey honey hook horizon horse hotel husky
iceberg igloo insect iris iron island ivory ivy jacket jaguar jasmine jelly jewel jigsaw jungle juniper kayak kelp
kernel kettle kitchen kite kitten koala label ladder lagoon lake lantern lapel lark laurel lava lavender leaf lemon
lens lentil leopard letter lilac lily lime linen lion lizard llama lobster locket lotus lumber lunch lynx magnet
magpie mango mantle maple marble margin market marsh mast meadow melon mercury metal meteor mill mint mirror mitten
monkey moose mosaic moss motor mountain muffin museum mustard napkin narrow nectar needle nest nickel noodle north
notebook nugget nutmeg oak oar oasis oat ocean olive onion opal orange orbit orchard orchid otter oven owl oyster
paddle palace palm panda panther paper parade parcel parrot pasture path pavement peach peanut pear pebble pelican
pencil penguin pepper piano picnic pigeon pillow pilot pine planet plaster plate plaza plum pocket pond pony poplar
poppy potato prairie prism puddle puffin pumpkin puppet quail quarry quartz quilt rabbit raccoon radar radio radish
rain raven record reef ribbon rice ridge river robin rocket roof rope rose rudder saddle saffron sail salad salmon
salt sand sandal satin sauce scarf school scooter seal season seed shadow sheep shelf shell shield ship shore shovel
silk silver singer sketch slate sled smoke snail snow socket sofa soup sparrow spice spider spinach spoon spruce
squash squirrel stable stadium stamp star statue steam stone storm stove straw stream street sugar summer sunset swan
table tailor tango teapot temple tennis tent thimble thistle throne thunder tiger timber tin toast tomato tower trail
train travel tree trout truck tulip tundra tunnel turkey turnip turtle umbrella valley vanilla vase velvet village
vine violet violin voyage waffle wagon walnut walrus water wave weasel whale wheat wheel whistle willow window winter
wolf wood wool yacht yarn yogurt zebra zinc zipper
"""
